/* Browsers start no workers for pages that were opened as files. There the worker of the search runs in a hidden frame.
   site/build.py puts it in the place of a script that the generator would fetch from elsewhere. */
if (location.protocol === "file:") {
  const load = (inner, url) =>
    new Promise((done, failed) => {
      const script = inner.document.createElement("script");
      script.onload = done;
      script.onerror = () => failed(new Error(`cannot load ${url}`));
      script.src = url;
      inner.document.head.append(script);
    });
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      this.inner = this.onmessage = this.onerror = null;
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.onload = () => {
        const inner = frame.contentWindow;
        frame.onload = null;
        // Later, as a worker's messages come: what fails in the page must not fail in the search.
        inner.postMessage = (data) => setTimeout(() => this.tell(structuredClone(data)));
        inner.importScripts = (...urls) =>
          urls.reduce((before, one) => before.then(() => load(inner, one)), Promise.resolve());
        load(inner, url).then(() => {
          this.inner = inner;
          this.waiting.splice(0).forEach((data) => this.postMessage(data));
        });
      };
      frame.srcdoc = "<!doctype html><title>search</title>";
      document.body.append(frame);
    }
    tell(data) {
      const event = new MessageEvent("message", { data });
      if (this.onmessage) this.onmessage(event);
      this.dispatchEvent(event);
    }
    postMessage(data) {
      const inner = this.inner;
      if (!inner) this.waiting.push(data);
      else inner.dispatchEvent(new inner.MessageEvent("message", { data: inner.structuredClone(data) }));
    }
    terminate() {}
  };
}
