// The page: it sends questions, shows the answers, and watches the service.

import { chat, getJSON } from "./api.js";
import { Composer } from "./composer.js";
import { Conversation } from "./conversation.js";
import { byId } from "./dom.js";
import { End } from "./end.js";
import { seconds, short } from "./format.js";
import { historyText } from "./history.js";
import { KeyForm } from "./key.js";
import { Watch } from "./watch.js";

const conversation = new Conversation(byId("turns"));
const composer = new Composer(ask);
const end = new End(document.querySelector("main"), byId("clear"));
const keyForm = new KeyForm(introduce);
const watch = new Watch(
  () => keyForm.ask(false),
  () => introduce(false),
);

introduce();
byId("copy").addEventListener("click", copy);
byId("clear").addEventListener("click", () => {
  conversation.clear();
  allow();
  byId("question").focus();
  composer.say("The conversation is cleared.");
});

/** Show the served model, or ask for a key if the service requires one. `focus` states whether to focus that form. */
async function introduce(focus = true) {
  try {
    const [model] = (await getJSON("v1/models")).data;
    byId("model").textContent = `${model.id}, ${short(model.max_model_len)} tokens of context`;
    document.title = `${model.id} – mindie_mm`;
    watch.locked = false;
    watch.now();
  } catch (error) {
    if (error.status !== 401) return; // `watch` shows other errors beside the model's name
    watch.locked = true;
    keyForm.ask(focus);
  }
}

/** Send a question and show the answer as it arrives. Return whether there is an answer. */
async function ask(question, items, signal) {
  const { earlier, ...options } = composer.options;
  const before = earlier ? conversation.answered : [];
  const turn = conversation.add(question, items);
  const turns = [...before, turn];
  const names = turns.flatMap((one) => one.items.map((item) => item.name));
  const told = { reason: null, usage: null, spans: [], timings: null, names };
  watch.asking = true;
  watch.now();
  composer.say("Asking.");
  allow();
  end.go();
  try {
    const messages = (await Promise.all(turns.map((one) => one.messages()))).flat();
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
    turn.end(told);
    composer.say(told.timings ? `Answered in ${seconds(told.timings.total_s)}.` : "Answered.");
  } catch (error) {
    if (error.name === "AbortError") {
      turn.end({ ...told, reason: "stopped" });
      composer.say("Stopped.");
    } else {
      turn.fail(error.message);
      composer.say("");
      if (error.status === 401) keyForm.ask();
    }
  }
  watch.asking = false;
  watch.memory.own([]);
  allow();
  return turn.answered;
}

/** Enable the buttons that apply to the conversation in its current state. */
function allow() {
  byId("copy").disabled = watch.asking || !conversation.answered.length;
  byId("clear").disabled = watch.asking || !conversation.turns.length;
}

async function copy() {
  let text, named;
  try {
    [text, named] = await historyText(conversation.answered);
  } catch (error) {
    composer.say(`The history cannot be copied: ${error.message}`);
    return;
  }
  try {
    await navigator.clipboard.writeText(text);
    const only = named.length ? ` For these items, only the names are copied: ${named.join(", ")}.` : "";
    composer.say(`The history is copied: ${short(text.length)} characters.${only}`);
  } catch {
    // Pages from other machines need TLS for the clipboard. Safari also refuses access long after the click.
    byId("copy-text").value = text;
    byId("copy-dialog").showModal();
    byId("copy-text").select();
  }
}
