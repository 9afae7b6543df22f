// Photos from the camera, with a preview.

import { byId } from "./dom.js";
import { offer, refusal } from "./recorder.js";

export class Camera {
  #dialog = byId("camera");
  #preview = this.#dialog.querySelector("video");
  #number = 0;

  /** Create the dialog that `button` opens. `done` gets the photo as a file, and `say` gets status messages. */
  constructor(button, done, say) {
    if (!offer(button)) return;
    button.addEventListener("click", () => this.#open(say));
    byId("take-photo").addEventListener("click", async () => {
      done(await this.#photo());
      this.#dialog.close();
    });
    this.#dialog.addEventListener("close", () => {
      this.#preview.srcObject?.getTracks().forEach((track) => track.stop());
      this.#preview.srcObject = null;
    });
  }

  async #open(say) {
    try {
      this.#preview.srcObject = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
      await this.#preview.play();
      this.#dialog.showModal();
    } catch (error) {
      say(refusal(error, "camera"));
    }
  }

  async #photo() {
    const canvas = document.createElement("canvas");
    canvas.width = this.#preview.videoWidth;
    canvas.height = this.#preview.videoHeight;
    canvas.getContext("2d").drawImage(this.#preview, 0, 0);
    const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.95));
    this.#number += 1;
    return new File([blob], `photo ${this.#number}.jpg`, { type: "image/jpeg" });
  }
}
