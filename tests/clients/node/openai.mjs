// Scenarios of openai for Node.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { BASE_URL, HELLO, HELLO_BACK, KEY, MODEL, PICTURE, RED_SQUARE, SOUND_BYTES, WHAT, checkWeather, scenario } from "./scenarios.mjs";

const client = new OpenAI({ baseURL: BASE_URL, apiKey: KEY, maxRetries: 0 });
const messages = [{ role: "user", content: HELLO }];
const chat = { model: MODEL, temperature: 0, messages };
const Weather = z.object({ city: z.enum(["Oslo", "Rome"]), days: z.enum(["1", "2", "3"]) });
const Thing = z.object({ color: z.enum(["red", "blue"]), sides: z.union([z.literal(3), z.literal(4)]).nullable() });
const parameters = {
  type: "object",
  properties: { city: { enum: ["Oslo", "Rome"] }, days: { enum: ["1", "2", "3"] } },
  required: ["city", "days"],
};
const tools = [{ type: "function", function: { name: "get_weather", description: "Weather.", parameters } }];
const named = { type: "function", function: { name: "get_weather" } };

await scenario("models", async () => {
  assert.deepEqual((await client.models.list()).data.map((model) => model.id), [MODEL]);
});

await scenario("chat", async () => {
  const answer = await client.chat.completions.create(chat);
  assert.equal(answer.choices[0].message.content, HELLO_BACK);
  assert(answer.usage.completion_tokens > 0);
});

await scenario("chat_streamed", async () => {
  const runner = client.chat.completions.stream({ ...chat, stream_options: { include_usage: true } });
  const pieces = [];
  runner.on("content", (piece) => pieces.push(piece));
  assert.equal(await runner.finalContent(), HELLO_BACK);
  assert.equal(pieces.join(""), HELLO_BACK);
  assert((await runner.totalUsage()).completion_tokens > 0);
});

await scenario("image", async () => {
  const content = [{ type: "image_url", image_url: { url: PICTURE } }, { type: "text", text: WHAT }];
  const answer = await client.chat.completions.create({ ...chat, messages: [{ role: "user", content }] });
  assert.equal(answer.choices[0].message.content, RED_SQUARE);
});

await scenario("tool_left_to_the_model", async () => {
  const answer = await client.chat.completions.create({ ...chat, tools, max_tokens: 8 });
  assert(answer.choices[0].message.content);
});

await scenario("tool_called", async () => {
  for (const tool_choice of ["required", named]) {
    const answer = await client.chat.completions.create({ ...chat, tools, tool_choice });
    assert.equal(answer.choices[0].finish_reason, "tool_calls");
    for (const call of answer.choices[0].message.tool_calls) checkWeather(JSON.parse(call.function.arguments));
  }
});

await scenario("tool_called_streamed", async () => {
  for (const tool_choice of ["required", named]) {
    const answer = await client.chat.completions.stream({ ...chat, tools, tool_choice }).finalChatCompletion();
    assert.equal(answer.choices[0].finish_reason, "tool_calls");
    for (const call of answer.choices[0].message.tool_calls) checkWeather(JSON.parse(call.function.arguments));
  }
});

await scenario("tool_parsed", async () => {
  const strict = [zodFunction({ name: "get_weather", parameters: Weather })];
  const answer = await client.chat.completions.parse({ ...chat, tools: strict, tool_choice: "required" });
  for (const call of answer.choices[0].message.tool_calls) checkWeather(call.function.parsed_arguments);
});

await scenario("tools_run", async () => {
  const seen = [];
  const run = async (values) => {
    seen.push(values);
    return "Sunny.";
  };
  for (const stream of [false, true]) {
    // If the request names a tool, the tool is called once, and the answer ends.
    const runner = client.chat.completions.runTools({
      ...chat,
      stream,
      tools: [{ type: "function", function: { ...tools[0].function, function: run, parse: JSON.parse } }],
      tool_choice: named,
    });
    await runner.done();
    const results = runner.messages.filter((message) => message.role === "tool");
    assert(results.length > 0);
    assert.equal(results[0].content, "Sunny.");
  }
  for (const values of seen) checkWeather(values);
});

await scenario("tool_result", async () => {
  const { message } = (await client.chat.completions.create({ ...chat, tools, tool_choice: named })).choices[0];
  const results = message.tool_calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: "Sunny." }));
  const turns = { ...chat, messages: [...messages, message, ...results], tools, max_tokens: 8 };
  assert((await client.chat.completions.create(turns)).choices[0].message.content);
});

await scenario("structured", async () => {
  const response_format = zodResponseFormat(Thing, "thing");
  const answer = await client.chat.completions.parse({ ...chat, response_format });
  Thing.parse(answer.choices[0].message.parsed);
});

await scenario("structured_streamed", async () => {
  const response_format = zodResponseFormat(Thing, "thing");
  const answer = await client.chat.completions.stream({ ...chat, response_format }).finalChatCompletion();
  Thing.parse(answer.choices[0].message.parsed);
});

await scenario("transcription", async () => {
  const file = () => new File([SOUND_BYTES], "three_beeps.wav", { type: "audio/wav" });
  const whole = await client.audio.transcriptions.create({ model: MODEL, file: file() });
  assert(whole.text);
  assert(whole.usage.output_tokens > 0);
  const verbose = { model: MODEL, file: file(), response_format: "verbose_json", language: "en" };
  const { text, duration, language, segments } = await client.audio.transcriptions.create(verbose);
  assert(text && duration > 0 && segments[0].avg_logprob < 0);
  assert.equal(language, "en");
  const srt = await client.audio.transcriptions.create({ model: MODEL, file: file(), response_format: "srt" });
  assert(srt.startsWith("1\n00:00:00,000 --> "));
  assert((await client.audio.translations.create({ model: MODEL, file: file() })).text);
});

await scenario("transcription_streamed", async () => {
  const ask = { model: MODEL, file: new File([SOUND_BYTES], "three_beeps.wav"), stream: true };
  const pieces = [];
  let last;
  for await (const event of await client.audio.transcriptions.create(ask)) {
    if (event.type === "transcript.text.delta") pieces.push(event.delta);
    else last = event;
  }
  assert.equal(last.type, "transcript.text.done");
  assert.equal(pieces.join(""), last.text);
});
