// What is wrong with a page as it is shown now, in words: text that runs out, that is too pale, or has no name.
() => {
  const faults = [];
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, below) => top.slice(0, 3).map((one, i) => one * top[3] + below[i] * (1 - top[3]));
  const light = (color) => {
    const [r, g, b] = color.map((one) => (one / 255 <= 0.04045 ? one / 255 / 12.92 : ((one / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    const layers = [];
    for (let one = node; one; one = one.parentElement) {
      const color = rgba(getComputedStyle(one).backgroundColor);
      if (color[3] > 0) layers.unshift(color);
      if (color[3] === 1) break;
    }
    const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
    return layers.reduce((below, top) => over(top, below), isDark ? [0, 0, 0] : [255, 255, 255]);
  };
  const name = (node) => `<${node.tagName.toLowerCase()}${node.id ? ` #${node.id}` : ""}${node.classList.length ? ` .${[...node.classList].join(".")}` : ""}>`;
  const isShown = (node) => node.checkVisibility({ opacityProperty: true, visibilityProperty: true }) &&
    !node.closest(".hidden, .skip, noscript, option");
  const scrolls = (node) => {
    for (let one = node; one && one !== document.body; one = one.parentElement) {
      if (["auto", "scroll", "hidden"].includes(getComputedStyle(one).overflowX) && one !== node) return true;
    }
    return false;
  };
  const wide = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > wide) faults.push(`the page is ${document.documentElement.scrollWidth} wide in ${wide}`);
  for (const node of document.body.querySelectorAll("*")) {
    if (!isShown(node)) continue;
    const box = node.getBoundingClientRect();
    if (box.width && box.right > wide + 1 && !scrolls(node)) faults.push(`${name(node)} ends at ${Math.round(box.right)} of ${wide}`);
    const text = [...node.childNodes].filter((one) => one.nodeType === 3).map((one) => one.data.trim()).join(" ").trim();
    if (text && !node.disabled && !(node instanceof HTMLTitleElement) && node.tagName !== "title") {
      const style = getComputedStyle(node), size = parseFloat(style.fontSize);
      const ground = behind(node), isSvg = node instanceof SVGElement;
      const front = over(rgba(isSvg ? style.fill : style.color), ground);
      const [low, high] = [light(front), light(ground)].sort((a, b) => a - b), ratio = (high + 0.05) / (low + 0.05);
      const least = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700) ? 3 : 4.5;
      if (ratio < least) faults.push(`${name(node)} "${text.slice(0, 30)}" has a contrast of ${ratio.toFixed(2)}`);
      if (node.matches("td, dd") && text.length > 15 && box.width < 80) faults.push(`${name(node)} "${text.slice(0, 30)}" stands in ${Math.round(box.width)} px`);
      if (size < 11) faults.push(`${name(node)} "${text.slice(0, 30)}" is ${size} px small`);
      if (node.scrollWidth > node.clientWidth + 1 && style.overflowX === "visible" && style.display !== "inline" && !isSvg) {
        faults.push(`${name(node)} "${text.slice(0, 30)}" runs ${node.scrollWidth - node.clientWidth} px out of its box`);
      }
    }
    if (["BUTTON", "A", "SUMMARY"].includes(node.tagName) && !(node.textContent.trim() || node.getAttribute("aria-label"))) {
      faults.push(`${name(node)} says nothing`);
    }
    if (["INPUT", "SELECT", "TEXTAREA"].includes(node.tagName) && node.type !== "hidden" &&
        !(node.labels?.length || node.getAttribute("aria-label") || node.getAttribute("aria-labelledby"))) {
      faults.push(`${name(node)} has no label`);
    }
    if (node.getAttribute("role") === "img" && !node.getAttribute("aria-label")) faults.push(`${name(node)} is a picture without words`);
  }
  for (const one of document.querySelectorAll("[id]")) {
    if (document.querySelectorAll(`[id="${CSS.escape(one.id)}"]`).length > 1) faults.push(`#${one.id} is there twice`);
  }
  return [...new Set(faults)];
}
