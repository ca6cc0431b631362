// What npm's openai makes of the server at argv[2], as one line of JSON. Run from the folder that has it.
import OpenAI from "openai";

const [address, key, asked, tool] = [process.argv[2], process.argv[3], JSON.parse(process.argv[4]), JSON.parse(process.argv[5])];
const client = new OpenAI({ baseURL: `${address}/v1`, apiKey: key, maxRetries: 0 });
const how = { model: "talking", temperature: 0 };
const who = [{ role: "user", content: "Who are you?" }];
const found = {};
const whole = await client.chat.completions.create({ ...how, messages: who });
found.text = whole.choices[0].message.content;
found.usage = whole.usage.total_tokens;
found.streamed = "";
const stream = await client.chat.completions.create({ ...how, messages: who, stream: true, stream_options: { include_usage: true } });
for await (const piece of stream) {
  found.streamed += piece.choices[0]?.delta?.content ?? "";
  if (piece.usage) found.streamed_usage = piece.usage.total_tokens;
}
const called = await client.chat.completions.create({ ...how, messages: [{ role: "user", content: asked }], tools: [tool] });
found.call = [called.choices[0].finish_reason, called.choices[0].message.tool_calls[0].function.name];
found.arguments = JSON.parse(called.choices[0].message.tool_calls[0].function.arguments);
const runner = client.chat.completions.stream({ ...how, messages: who });
found.later = await runner.finalContent();
const usual = await client.embeddings.create({ model: "talking", input: "a" });
const plain = await client.embeddings.create({ model: "talking", input: "a", encoding_format: "float" });
found.width = usual.data[0].embedding.length;
found.apart = Math.max(...usual.data[0].embedding.map((one, i) => Math.abs(one - plain.data[0].embedding[i])));
const abort = new AbortController();
const song = await client.chat.completions.create(
  { ...how, messages: [{ role: "user", content: "Sing" }], stream: true, max_tokens: 900 }, { signal: abort.signal });
try {
  for await (const _ of song) abort.abort();
} catch { /* as asked */ }
try {
  await client.chat.completions.create({ ...how, model: "nobody", messages: who });
} catch (error) {
  found.refused = [error.status, error.code];
}
console.log(JSON.stringify(found));
