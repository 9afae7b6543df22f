// The conversation as a text that /v1/completions and /infer take: pictures in text-generation-webui's form.

import { dataURL } from "./items.js";

const QUALITY = 0.95;

/** The text of turns, each {question, items, answer}. */
export async function historyText(turns) {
  const texts = turns.map(async ({ question, items, answer }) => {
    const media = await Promise.all(items.map(itemText));
    return `### Human: ${media.join("")}${question}\n### Assistant: ${answer}\n`;
  });
  return (await Promise.all(texts)).join("");
}

/** A picture as a tag; the form has no other media, which are named. */
async function itemText(item) {
  const named = `[${item.kind}: ${item.name}]`;
  if (item.kind !== "image") return named;
  if (item.file.type === "image/jpeg") return `<img src="${await dataURL(item.file)}">`;
  const picture = await createImageBitmap(item.file).catch(() => null); // a TIFF, say, which browsers do not read
  return picture ? `<img src="${jpegURL(picture)}">` : named;
}

function jpegURL(picture) {
  const canvas = document.createElement("canvas");
  canvas.width = picture.width;
  canvas.height = picture.height;
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // where the picture is transparent, which JPEG cannot be
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(picture, 0, 0);
  return canvas.toDataURL("image/jpeg", QUALITY);
}
