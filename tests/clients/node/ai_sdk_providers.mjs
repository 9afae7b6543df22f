// Scenarios of the AI SDK, with its providers for OpenAI's Responses API and for Anthropic's Messages API.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { Output, experimental_transcribe as transcribe, generateText, stepCountIs, streamText, tool } from "ai";
import assert from "node:assert/strict";
import { z } from "zod";
import {
  BASE_URL, HELLO, HELLO_BACK, KEY, MODEL, PDF_BYTES, PICTURE_BYTES, RED_SQUARE, SOUND_BYTES, WHAT, checkWeather, scenario,
} from "./scenarios.mjs";

const given = { baseURL: BASE_URL, apiKey: KEY };
const responses = { model: createOpenAI(given)(MODEL), temperature: 0, maxRetries: 0, maxOutputTokens: 300 };
const messages = { model: createAnthropic(given)(MODEL), temperature: 0, maxRetries: 0, maxOutputTokens: 300 };
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

async function chat(ask) {
  const { text, usage, finishReason } = await generateText({ ...ask, prompt: HELLO });
  assert.equal(text, HELLO_BACK);
  assert.equal(finishReason, "stop");
  assert(usage.outputTokens > 0);
}

async function chatStreamed(ask) {
  const result = streamText({ ...ask, prompt: HELLO, onError });
  const pieces = [];
  for await (const piece of result.textStream) pieces.push(piece);
  assert.equal(pieces.join(""), HELLO_BACK);
  assert((await result.usage).outputTokens > 0);
}

async function media(ask) {
  for (const [data, mediaType, filename] of [
    [PICTURE_BYTES, "image/png", undefined],
    [PDF_BYTES, "application/pdf", "red_square.pdf"],
  ]) {
    const content = [{ type: "file", data, mediaType, filename }, { type: "text", text: WHAT }];
    const { text } = await generateText({ ...ask, messages: [{ role: "user", content }] });
    assert.equal(text, RED_SQUARE);
  }
}

async function toolCalled(ask) {
  for (const toolChoice of ["required", named]) {
    const { toolCalls, finishReason } = await generateText({ ...ask, prompt: HELLO, tools, toolChoice });
    assert.equal(finishReason, "tool-calls");
    assert(toolCalls.length > 0);
    for (const call of toolCalls) checkWeather(call.input);
    const result = streamText({ ...ask, prompt: HELLO, tools, toolChoice, onError });
    const kinds = new Set();
    for await (const part of result.fullStream) kinds.add(part.type);
    for (const kind of ["tool-input-start", "tool-input-delta", "tool-input-end", "tool-call", "tool-result"])
      assert(kinds.has(kind), kind);
  }
}

async function toolResult(ask) {
  // The first step calls the tool, and the second step answers. The provider refers to earlier items by their ids.
  const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "auto" });
  const all = { ...ask, prompt: HELLO, tools, prepareStep, stopWhen: stepCountIs(2), maxOutputTokens: 400 };
  const { steps, text, response } = await generateText(all);
  assert.equal(steps.length, 2);
  assert(text);
  const turns = [{ role: "user", content: HELLO }, ...response.messages, { role: "user", content: "Thanks" }];
  assert((await generateText({ ...ask, messages: turns, maxOutputTokens: 8 })).text);
  const result = streamText({ ...all, onError });
  await result.consumeStream();
  assert.equal((await result.steps).length, 2);
}

async function structured(ask) {
  const { output } = await generateText({ ...ask, prompt: HELLO, output: Output.object({ schema: Thing }) });
  Thing.parse(output);
}

await scenario("responses_chat", () => chat(responses));
await scenario("responses_chat_streamed", () => chatStreamed(responses));
await scenario("responses_media", () => media(responses));
await scenario("responses_tool_called", () => toolCalled(responses));
await scenario("responses_tool_result", () => toolResult(responses));
await scenario("responses_structured", () => structured(responses));
await scenario("messages_chat", () => chat(messages));
await scenario("messages_chat_streamed", () => chatStreamed(messages));
await scenario("messages_media", () => media(messages));
await scenario("messages_tool_called", () => toolCalled(messages));
await scenario("messages_tool_result", () => toolResult(messages));
await scenario("messages_structured", () => structured(messages));

await scenario("transcription", async () => {
  const model = createOpenAI(given).transcription(MODEL);
  const { text } = await transcribe({ model, audio: SOUND_BYTES, maxRetries: 0 });
  assert(text);
});
