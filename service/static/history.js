// The conversation as a text for /v1/completions and /infer, with images in the format of text-generation-webui.

import { dataURL } from "./items.js";

const QUALITY = 0.95;

/** Return the text of turns, each {question, items, answer}, and the names of the items that it only names. */
export async function historyText(turns) {
  const named = [];
  const itemText = async (item) => {
    const url = item.kind === "image" && (await jpegURL(item.file));
    if (url) return `<img src="${url}">`;
    named.push(item.name); // the format supports only images
    return `[${item.kind}: ${item.name}]`;
  };
  const texts = turns.map(async ({ question, items, answer }) => {
    const media = await Promise.all(items.map(itemText));
    return `### Human: ${media.join("")}${question}\n### Assistant: ${answer}\n`;
  });
  return [(await Promise.all(texts)).join(""), named];
}

/** Return a data: URL of the image as JPEG, or null if the browser cannot read it or it is too large for a canvas. */
async function jpegURL(file) {
  if (file.type === "image/jpeg") return dataURL(file);
  const picture = await createImageBitmap(file).catch(() => null);
  if (!picture) return null;
  const canvas = document.createElement("canvas");
  canvas.width = picture.width;
  canvas.height = picture.height;
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // background for transparent images, because JPEG has no transparency
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(picture, 0, 0);
  const url = canvas.toDataURL("image/jpeg", QUALITY);
  return url.startsWith("data:image/jpeg") ? url : null;
}
