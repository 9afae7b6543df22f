// Recording of audio or video with the browser's MediaRecorder.

import { seconds } from "./format.js";

const TYPES = {
  audio: ["audio/webm", "audio/ogg", "audio/mp4"],
  video: ["video/webm", "video/mp4"],
};

/** Disable the button and return false if the browser cannot record on this page. */
export function offer(button) {
  if (navigator.mediaDevices && window.MediaRecorder) return true;
  button.disabled = true;
  button.title = "This browser can record only on pages that use HTTPS or come from this machine.";
  return false;
}

/** Return why `device` cannot be used. */
export function refusal(error, device) {
  return error.name === "NotFoundError" ? `There is no ${device}.` : `The ${device} cannot be used: ${error.message}`;
}

export class Recorder {
  #kind;
  #button;
  #label;
  #title;
  #done;
  #say;
  #recorder = null;
  #starting = false;
  #number = 0;

  /** Create a recorder of `kind`, with a button to start and stop. `done` gets the file, and `say` gets status messages. */
  constructor(kind, button, done, say) {
    this.#kind = kind;
    this.#button = button;
    this.#label = button.querySelector("span");
    this.#title = this.#label.textContent;
    this.#done = done;
    this.#say = say;
    if (!offer(button)) return;
    button.addEventListener("click", () => (this.#recorder ? this.stop() : this.#start()));
  }

  /** Stop the recording, if there is one, and wait until `done` has been called with it. */
  async stop() {
    if (!this.#recorder) return;
    const stopped = new Promise((resolve) => this.#recorder.addEventListener("stop", resolve));
    this.#recorder.stop();
    await stopped;
  }

  async #start() {
    const device = this.#kind === "audio" ? "microphone" : "camera";
    if (this.#starting) {
      // Do not start a second recorder, because no button could stop it.
      this.#say(`The browser asks whether this page may use the ${device}.`);
      return;
    }
    this.#starting = true;
    let stream;
    try {
      stream = await navigator.mediaDevices.getUserMedia({ [this.#kind]: true });
      this.#record(stream);
    } catch (error) {
      stream?.getTracks().forEach((track) => track.stop());
      this.#say(refusal(error, device));
    } finally {
      this.#starting = false;
    }
  }

  #record(stream) {
    const mimeType = TYPES[this.#kind].find((one) => MediaRecorder.isTypeSupported(one)); // or the browser's choice
    const pieces = [];
    const started = performance.now();
    const recorder = new MediaRecorder(stream, { mimeType });
    recorder.ondataavailable = ({ data }) => pieces.push(data);
    recorder.onstart = () => this.#say(`Recording ${this.#kind === "audio" ? "audio" : "video, without audio"}.`);
    recorder.onstop = () => {
      clearInterval(clock);
      stream.getTracks().forEach((track) => track.stop());
      this.#recorder = null;
      this.#label.textContent = this.#title;
      this.#button.classList.remove("recording");
      this.#number += 1;
      const [type] = recorder.mimeType.split(";"); // drop the codecs, whose comma would end the header of a data: URL
      this.#done(new File(pieces, `recording ${this.#number}.${type.split("/")[1]}`, { type }));
    };
    recorder.start();
    const show = () => {
      this.#label.textContent = `Stop recording, ${seconds(Math.round((performance.now() - started) / 1000))}`;
    };
    const clock = setInterval(show, 1000);
    this.#recorder = recorder;
    this.#button.classList.add("recording");
    this.#label.textContent = "Stop recording";
  }
}
