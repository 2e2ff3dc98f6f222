// openai-node against `ruvllm serve`, as clients.py has it: node clients.mjs http://127.0.0.1:8080
import assert from "node:assert/strict";
import OpenAI from "openai";

const base = process.argv[2].replace(/\/$/, "") + "/v1";
const client = new OpenAI({ baseURL: base, apiKey: "secret", maxRetries: 0 });
const question = [{ role: "user", content: "What is a trait?" }];
const choose = [{ role: "user", content: "Choose." }];
const schema = {
  type: "object", properties: { n: { type: "integer", minimum: 0, maximum: 9 } }, required: ["n"], additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "choose", description: "Chooses a number.", parameters: schema } }];
const isChoice = (text) => {
  const value = JSON.parse(text);
  assert.deepEqual(Object.keys(value), ["n"]);
  assert(value.n >= 0 && value.n <= 9);
};
const chat = (more) => client.chat.completions.create({ model: "m", messages: question, max_tokens: 12, ...more });

// Chat, streamed and whole.
assert((await client.models.list()).data.length >= 1);
const whole = await chat({});
const text = whole.choices[0].message.content;
assert(text && whole._request_id);
let [streamed, usage] = ["", null];
for await (const chunk of await chat({ stream: true, stream_options: { include_usage: true } })) {
  streamed += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(streamed, text);
assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
assert.equal(await client.chat.completions.stream({ model: "m", messages: question, max_tokens: 12 }).finalContent(), text);
// A stream that is left ends there.
for await (const chunk of await chat({ stream: true, max_tokens: 400 })) {
  assert(chunk.choices);
  break;
}
assert.equal((await chat({ n: 3, temperature: 1.5, seed: 7 })).choices.length, 3);
const told = (await chat({ logprobs: true, top_logprobs: 3 })).choices[0].logprobs.content;
assert(told.length > 0 && told.every((token) => token.top_logprobs.length === 3));
const word = text.split(/\s+/).reduce((a, b) => (b.length > a.length ? b : a));
assert(!(await chat({ stop: [word] })).choices[0].message.content.includes(word));

// Schema and tools.
const format = { type: "json_schema", json_schema: { name: "choice", strict: true, schema } };
isChoice((await chat({ messages: choose, max_tokens: 200, response_format: format })).choices[0].message.content);
const called = await chat({ messages: choose, max_tokens: 200, tools, tool_choice: "required", parallel_tool_calls: false });
const [call] = called.choices[0].message.tool_calls;
isChoice(call.function.arguments);
const runner = client.chat.completions.stream({
  model: "m", messages: choose, max_tokens: 200, tools, tool_choice: "required", parallel_tool_calls: false,
});
isChoice((await runner.finalChatCompletion()).choices[0].message.tool_calls[0].function.arguments);
const result = { role: "tool", tool_call_id: call.id, content: "done" };
assert((await chat({ messages: [...choose, called.choices[0].message, result], tools })).choices[0].finish_reason);

// Completions, embeddings, responses.
assert((await client.completions.create({ model: "m", prompt: "Ownership is", max_tokens: 4 })).choices[0].text);
const [one, other] = (await client.embeddings.create({ model: "m", input: ["one", "two words"] })).data;
assert(one.embedding.length > 0 && one.embedding.length === other.embedding.length && typeof one.embedding[0] === "number");
const response = await client.responses.create({ model: "m", input: "What is a trait?", max_output_tokens: 12 });
assert(response.output_text);
const stream = client.responses.stream({ model: "m", input: "What is a trait?", max_output_tokens: 12 });
assert.equal((await stream.finalResponse()).output_text, response.output_text);

// Errors.
await assert.rejects(chat({ temperature: -1 }), OpenAI.BadRequestError);
await assert.rejects(new OpenAI({ baseURL: base, apiKey: "no", maxRetries: 0 }).models.list(), OpenAI.AuthenticationError);
console.log("openai-node: as it should be");
