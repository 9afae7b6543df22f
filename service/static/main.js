// The page: it connects the chat, the list of conversations, the settings and the diagrams.

import { getJSON } from "./api.js";
import { Chat } from "./chat.js";
import { Chats } from "./chats.js";
import { Composer } from "./composer.js";
import { Conversation } from "./conversation.js";
import { byId } from "./dom.js";
import { connect, isWide, onWidth } from "./drawer.js";
import { End } from "./end.js";
import { showExamples } from "./examples.js";
import { download } from "./export.js";
import { short } from "./format.js";
import { KeyForm } from "./key.js";
import { Settings } from "./settings.js";
import { Store } from "./store.js";
import { Watch } from "./watch.js";

const settings = new Settings();
const store = new Store();
const end = new End(byId("log"), byId("turns"));
const keyForm = new KeyForm(introduce);
const composer = new Composer(settings, (...asked) => chat.ask(...asked));
const watch = new Watch(
  () => keyForm.ask(false),
  () => introduce(false),
);
const chat = new Chat({ composer, settings, store, watch, end, copy, kept: list, refused: () => keyForm.ask() });
const chats = new Chats({ rename, download: exported, remove });
const running = new Map(); // conversations whose answer may still arrive

const showChats = connect(byId("chats-button"), byId("sidebar"));
connect(byId("service-button"), byId("service"), () => watch.now());
showChats(isWide());
onWidth(() => showChats(isWide()));
showExamples(byId("examples"), (...asked) => composer.run((signal) => chat.ask(...asked, signal)));
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the part of an address after # names a conversation
  byId("question").focus();
});
byId("new").addEventListener("click", startNew);
addEventListener("hashchange", open);
document.addEventListener("keydown", (event) => {
  if (!event.shiftKey || !(event.ctrlKey || event.metaKey) || event.code !== "KeyO") return;
  event.preventDefault();
  startNew();
});
introduce();
open();

/** Show the served model, or ask for a key if the service requires one. `focus` states whether to focus that form. */
async function introduce(focus = true) {
  try {
    const [model] = (await getJSON("v1/models")).data;
    byId("model").textContent = `${model.id}, ${short(model.max_model_len)} tokens of context`;
    byId("note").textContent = model.note ?? "";
    document.title = `${model.id} – mindie_mm`;
    watch.locked = false;
    watch.now();
  } catch (error) {
    if (error.status !== 401) return; // `watch` shows other errors beside the model's name
    watch.locked = true;
    keyForm.ask(focus);
  }
}

/** Open the conversation that the address names, or a new one. */
async function open() {
  const id = location.hash.slice(1);
  if (id === chat.conversation.id) return;
  if (composer.busy) running.set(chat.conversation.id, chat.conversation);
  else running.clear();
  const record = id && !running.has(id) ? await store.conversation(id).catch(() => null) : null;
  const conversation = running.get(id) ?? new Conversation(record ?? { system: settings.system });
  settings.system = conversation.system;
  chat.open(conversation);
  list();
}

function startNew() {
  if (location.hash) location.hash = "";
  else if (chat.conversation.turns.length) open();
  if (!isWide()) showChats(false);
  byId("question").focus();
}

/** Show the list of conversations. */
async function list() {
  const { id, turns } = chat.conversation;
  history.replaceState(null, "", turns.length ? `#${id}` : "");
  try {
    chats.show(await store.conversations(), id);
  } catch (error) {
    byId("no-chats").textContent = `The browser keeps no conversations: ${error.message}`;
  }
}

/** Return the conversation with an id if it is shown, or its answer may still arrive. */
function inUse(id) {
  return id === chat.conversation.id ? chat.conversation : running.get(id);
}

async function rename(record, title) {
  const conversation = inUse(record.id);
  if (conversation) conversation.title = title;
  await store.put({ conversations: [{ ...record, title }] });
  list();
}

async function remove(record) {
  if (!confirm(`Delete “${record.title}” from this browser?`)) return;
  chat.drop(inUse(record.id));
  running.delete(record.id);
  await store.delete(record.id);
  if (record.id === chat.conversation.id) startNew(); // which lists the others
  else list();
}

async function exported({ id }) {
  download(inUse(id) ?? new Conversation(await store.conversation(id)));
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    composer.say("Copied.");
  } catch {
    // Pages from other machines need TLS for the clipboard.
    byId("copy-text").value = text;
    byId("copy-dialog").showModal();
    byId("copy-text").select();
  }
}
