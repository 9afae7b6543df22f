// Scenarios of the AI SDK, with its provider for servers that are compatible with OpenAI.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, ToolLoopAgent, generateText, stepCountIs, streamText, tool } from "ai";
import assert from "node:assert/strict";
import { z } from "zod";
import {
  BASE_URL, HELLO, HELLO_BACK, HOW_MANY, KEY, MODEL, PDF_BYTES, PICTURE_BYTES, RED_SQUARE, SOUND_BYTES, THREE, WHAT,
  checkWeather, scenario,
} from "./scenarios.mjs";

const provider = createOpenAICompatible({
  name: "local",
  baseURL: BASE_URL,
  apiKey: KEY,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const withoutSchemas = createOpenAICompatible({ name: "local", baseURL: BASE_URL, apiKey: KEY });
const ask = { model: provider(MODEL), temperature: 0, maxRetries: 0, prompt: HELLO };
const Weather = z.object({ city: z.enum(["Oslo", "Rome"]), days: z.enum(["1", "2", "3"]) });
const Thing = z.object({ color: z.enum(["red", "blue"]), sides: z.union([z.literal(3), z.literal(4)]).nullable() });
const getWeather = tool({
  description: "Weather.",
  inputSchema: Weather,
  execute: async ({ city }) => `Sunny in ${city}.`,
});
const tools = { get_weather: getWeather };
const named = { type: "tool", toolName: "get_weather" };
const onError = ({ error }) => {
  throw error;
};

await scenario("chat", async () => {
  const { text, usage, finishReason } = await generateText(ask);
  assert.equal(text, HELLO_BACK);
  assert.equal(finishReason, "stop");
  assert(usage.outputTokens > 0);
});

await scenario("chat_streamed", async () => {
  const result = streamText({ ...ask, onError });
  const pieces = [];
  for await (const piece of result.textStream) pieces.push(piece);
  assert.equal(pieces.join(""), HELLO_BACK);
  assert(pieces.length > 1);
  assert((await result.usage).outputTokens > 0);
});

await scenario("image", async () => {
  const content = [
    { type: "file", data: PICTURE_BYTES, mediaType: "image/png" },
    { type: "text", text: WHAT },
  ];
  const { text } = await generateText({ ...ask, prompt: undefined, messages: [{ role: "user", content }] });
  assert.equal(text, RED_SQUARE);
});

await scenario("pdf", async () => {
  const content = [
    { type: "file", data: PDF_BYTES, mediaType: "application/pdf", filename: "red_square.pdf" },
    { type: "text", text: WHAT },
  ];
  const { text } = await generateText({ ...ask, prompt: undefined, messages: [{ role: "user", content }] });
  assert.equal(text, RED_SQUARE);
});

await scenario("audio", async () => {
  const content = [
    { type: "file", data: SOUND_BYTES, mediaType: "audio/wav" },
    { type: "text", text: HOW_MANY },
  ];
  const { text } = await generateText({ ...ask, prompt: undefined, messages: [{ role: "user", content }] });
  assert.equal(text, THREE);
});

await scenario("tool_left_to_the_model", async () => {
  assert((await generateText({ ...ask, tools, maxOutputTokens: 8 })).text);
});

await scenario("tool_called", async () => {
  for (const toolChoice of ["required", named]) {
    const { toolCalls, toolResults, finishReason } = await generateText({ ...ask, tools, toolChoice });
    assert.equal(finishReason, "tool-calls");
    assert(toolCalls.length > 0);
    for (const call of toolCalls) checkWeather(call.input);
    assert.equal(toolResults.length, toolCalls.length);
  }
});

await scenario("tool_called_streamed", async () => {
  for (const toolChoice of ["required", named]) {
    const result = streamText({ ...ask, tools, toolChoice, onError });
    const kinds = new Set();
    for await (const part of result.fullStream) kinds.add(part.type);
    for (const kind of ["tool-input-start", "tool-input-delta", "tool-input-end", "tool-call", "tool-result"])
      assert(kinds.has(kind), kind);
    for (const call of await result.toolCalls) checkWeather(call.input);
  }
});

await scenario("tool_result", async () => {
  // The first step calls the tool, and the second step answers.
  const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "auto" });
  const given = { ...ask, tools, prepareStep, stopWhen: stepCountIs(2), maxOutputTokens: 400 };
  const { steps, text } = await generateText(given);
  assert.equal(steps.length, 2);
  assert(text);
  const result = streamText({ ...given, onError });
  await result.consumeStream();
  assert.equal((await result.steps).length, 2);
  assert(await result.text);
});

await scenario("agent", async () => {
  const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? named : "auto" });
  const agent = new ToolLoopAgent({ model: ask.model, instructions: "Help.", tools, prepareStep, temperature: 0, maxOutputTokens: 300 });
  const { steps, text } = await agent.generate({ prompt: HELLO });
  assert.equal(steps.length, 2);
  assert(text);
});

await scenario("structured", async () => {
  const thing = await generateText({ ...ask, output: Output.object({ schema: Thing }) });
  Thing.parse(thing.output);
  const choice = await generateText({ ...ask, output: Output.choice({ options: ["yes", "no"] }) });
  assert(["yes", "no"].includes(choice.output));
});

await scenario("structured_streamed", async () => {
  const result = streamText({ ...ask, output: Output.object({ schema: Thing }), onError });
  const partial = [];
  for await (const object of result.partialOutputStream) partial.push(object);
  assert(partial.length > 0);
  Thing.parse(await result.output);
});

await scenario("structured_by_prompt", async () => {
  // Without the setting that the server supports schemas, the provider asks for any JSON object.
  const model = withoutSchemas(MODEL);
  const { output } = await generateText({ ...ask, model, maxOutputTokens: 300, output: Output.json() });
  assert.equal(typeof output, "object");
});
