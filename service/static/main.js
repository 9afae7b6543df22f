// The page: asks, shows answers, and watches the service meanwhile.

import { chat, getJSON } from "./api.js";
import { Composer } from "./composer.js";
import { Conversation } from "./conversation.js";
import { byId } from "./dom.js";
import { seconds, short } from "./format.js";
import { historyText } from "./history.js";
import { KeyForm } from "./key.js";
import { Watch } from "./watch.js";

const conversation = new Conversation(byId("turns"));
const composer = new Composer(ask);
const keyForm = new KeyForm(introduce);
const watch = new Watch(() => keyForm.ask());

introduce();
byId("copy").addEventListener("click", copy);
byId("clear").addEventListener("click", () => {
  conversation.clear();
  allow();
  byId("question").focus();
  composer.say("The conversation is cleared.");
});

/** Says which model is served; asks for a key where it takes one. */
async function introduce() {
  try {
    const [model] = (await getJSON("v1/models")).data;
    byId("model").textContent = `${model.id}, ${short(model.max_model_len)} tokens of context`;
    document.title = `${model.id} – mindie_mm`;
    watch.locked = false;
    watch.now();
  } catch (error) {
    if (error.status === 401) {
      watch.locked = true;
      keyForm.ask();
    } else composer.say(error.message);
  }
}

/** Asks, and shows the answer as it comes. False where that failed, or was stopped before the answer began. */
async function ask(question, items, signal) {
  const { earlier, ...options } = composer.options;
  const before = earlier ? conversation.turns.filter((turn) => turn.whole) : [];
  const turn = conversation.add(question, items);
  const told = { reason: null, usage: null, spans: [], timings: null };
  let answered = true;
  watch.asking = true;
  composer.say("Asking.");
  allow();
  turn.element.scrollIntoView({ block: "nearest" });
  try {
    const messages = (await Promise.all([...before, turn].map((one) => one.messages()))).flat();
    const body = { messages, ...options, timings: true, media_spans: true, stream_options: { include_usage: true } };
    for await (const chunk of chat(body, signal)) {
      if (chunk.media_spans) {
        told.spans = chunk.media_spans;
        watch.memory.own(told.spans.map((span) => span.block));
        watch.now();
      }
      const [choice] = chunk.choices;
      if (choice?.delta.content) turn.add(choice.delta.content);
      told.reason = choice?.finish_reason ?? told.reason;
      told.usage = chunk.usage ?? told.usage;
      told.timings = chunk.timings ?? told.timings;
    }
    const names = [...before, turn].flatMap((one) => one.items.map((item) => item.name));
    turn.end({ ...told, names });
    composer.say(`Answered in ${seconds(told.timings.total_s)}.`);
  } catch (error) {
    if (error.name === "AbortError") {
      answered = turn.answer !== "";
      turn.end({ ...told, reason: "stopped" });
      composer.say("Stopped.");
    } else {
      answered = false;
      turn.fail(error.message);
      composer.say("");
      if (error.status === 401) keyForm.ask();
    }
  }
  watch.asking = false;
  watch.memory.own([]);
  turn.element.scrollIntoView({ block: "nearest" });
  allow();
  return answered;
}

/** What can be done with the conversation, as it is. */
function allow() {
  for (const id of ["copy", "clear"]) byId(id).disabled = watch.asking || !conversation.turns.length;
}

async function copy() {
  let text;
  try {
    text = await historyText(conversation.turns);
  } catch (error) {
    composer.say(`The history cannot be copied: ${error.message}`);
    return;
  }
  try {
    await navigator.clipboard.writeText(text);
    composer.say(`The history is copied: ${short(text.length)} characters.`);
  } catch {
    // Pages of other machines without TLS have no clipboard; others refuse it, Safari long after the click.
    byId("copy-text").value = text;
    byId("copy-dialog").showModal();
    byId("copy-text").select();
  }
}
