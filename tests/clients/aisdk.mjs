// The AI SDK against `ruvllm serve`: node aisdk.mjs http://127.0.0.1:8080
// The server has to have a grammar of short texts, as a small model goes on for ever.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false;
const baseURL = process.argv[2].replace(/\/$/, "") + "/v1";
const provider = createOpenAICompatible({ name: "ruvllm", baseURL, apiKey: "secret", includeUsage: true, supportsStructuredOutputs: true });
const model = provider("m");
// A small model would go on calling.
const providerOptions = { ruvllm: { parallel_tool_calls: false } };
const ask = { model, prompt: "Choose.", maxOutputTokens: 64, temperature: 0, maxRetries: 0, providerOptions };
const n = z.object({ n: z.number().int().min(0).max(9) });

// A forced call: the tool runs, what it returns goes back, and the model answers. Whole, and streamed.
const trip = () => {
  const chosen = [];
  const choose = tool({
    description: "Chooses a number.",
    inputSchema: n,
    execute: async (input) => {
      chosen.push(input.n);
      return "chosen";
    },
  });
  const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" });
  return { chosen, settings: { ...ask, tools: { choose }, prepareStep, stopWhen: stepCountIs(2) } };
};
const isTrip = (chosen, steps, text) => {
  assert(chosen.length >= 1 && chosen.every((one) => one >= 0 && one <= 9), JSON.stringify(chosen));
  assert.equal(steps.length, 2);
  assert.equal(steps[0].finishReason, "tool-calls");
  assert.equal(steps[0].toolResults[0].output, "chosen");
  assert(text.length > 0);
};
const whole = trip();
const generated = await generateText(whole.settings);
isTrip(whole.chosen, generated.steps, generated.text);
const streamed = trip();
const stream = streamText(streamed.settings);
let text = "";
for await (const part of stream.textStream) text += part;
isTrip(streamed.chosen, await stream.steps, text);
assert((await stream.totalUsage).outputTokens > 0);

// An object of a schema.
const { object } = await generateObject({ ...ask, schema: n });
assert(object.n >= 0 && object.n <= 9);
console.log("ai-sdk: as it should be");
