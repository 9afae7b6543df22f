// Code that the scripts of the clients for Node share: the values of scenarios.py, and the report.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";

const [url, media] = process.argv.slice(2);

export const BASE_URL = `${url}/v1`;
export const MODEL = "tiny";
export const KEY = "none";
export const PICTURE_BYTES = readFileSync(`${media}/red_square.png`);
export const PICTURE = `data:image/png;base64,${PICTURE_BYTES.toString("base64")}`;
export const PDF_BYTES = readFileSync(`${media}/red_square.pdf`);
export const SOUND_BYTES = readFileSync(`${media}/three_beeps.wav`);
export const HELLO = "Hello!";
export const HELLO_BACK = "Hello! Show me a picture of a shape and ask me about it.";
export const WHAT = "What is in the image?";
export const RED_SQUARE = "red square";
export const HOW_MANY = "How many beeps do you hear?";
export const THREE = "3";

/** Check the arguments of a call to the weather tool. */
export function checkWeather(values) {
  assert.deepEqual(Object.keys(values).sort(), ["city", "days"]);
  assert(["Oslo", "Rome"].includes(values.city), values.city);
  assert(["1", "2", "3"].includes(values.days), values.days);
}

/** Run a scenario, and write a line of JSON with its name and its error. */
export async function scenario(name, run) {
  let error = null;
  try {
    await run();
  } catch (raised) {
    error = String(raised?.stack ?? raised);
    if (raised?.responseBody) error += `\n${raised.responseBody}`;
  }
  console.log(JSON.stringify({ scenario: name, error }));
}
