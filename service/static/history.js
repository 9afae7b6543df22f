// The conversation as a text that /v1/completions and /infer take: pictures in text-generation-webui's form.

import { dataURL } from "./items.js";

const QUALITY = 0.95;

/** The text of turns, each {question, items, answer}; and the names of items that are but named in it. */
export async function historyText(turns) {
  const named = [];
  const itemText = async (item) => {
    const url = item.kind === "image" && (await jpegURL(item.file));
    if (url) return `<img src="${url}">`;
    named.push(item.name); // the form has no other media
    return `[${item.kind}: ${item.name}]`;
  };
  const texts = turns.map(async ({ question, items, answer }) => {
    const media = await Promise.all(items.map(itemText));
    return `### Human: ${media.join("")}${question}\n### Assistant: ${answer}\n`;
  });
  return [(await Promise.all(texts)).join(""), named];
}

/** Null for what the browser does not read, a TIFF, say, and for what is larger than its canvases. */
async function jpegURL(file) {
  if (file.type === "image/jpeg") return dataURL(file);
  const picture = await createImageBitmap(file).catch(() => null);
  if (!picture) return null;
  const canvas = document.createElement("canvas");
  canvas.width = picture.width;
  canvas.height = picture.height;
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // where the picture is transparent, which JPEG cannot be
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(picture, 0, 0);
  const url = canvas.toDataURL("image/jpeg", QUALITY);
  return url.startsWith("data:image/jpeg") ? url : null;
}
