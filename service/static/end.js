// Automatic scrolling: the end of the conversation stays in view while an answer grows, if the reader is there.

const NEAR_PX = 100; // tolerance, because the answer grows while the reader scrolls to its end

export class End {
  #frame;
  #there = true;
  #last = 0;

  /** Follow the end of `column`, which grows inside the scrolling element `frame`. */
  constructor(frame, column) {
    this.#frame = frame;
    frame.addEventListener("scroll", () => {
      // The reader leaves the end only by scrolling up, not because the answer grew. The first upward step counts, even
      // if the end is still near, because following the end would interrupt the scrolling. A column that becomes shorter
      // also scrolls up, but to its end.
      const left = frame.scrollTop < this.#last && this.#below() > 1;
      this.#there = !left && (this.#there || this.#below() <= NEAR_PX);
      this.#last = frame.scrollTop;
    });
    frame.addEventListener("wheel", ({ deltaY }) => {
      // Without this, following the end could stop the scrolling before its first event.
      if (deltaY < 0 && frame.scrollTop > 0) this.#there = false;
    });
    const observer = new ResizeObserver(() => this.#there && this.go());
    observer.observe(column);
    observer.observe(frame);
  }

  /** Scroll to the end and stay there. */
  go() {
    this.#there = true;
    this.#frame.scrollTop = this.#frame.scrollHeight;
    this.#last = this.#frame.scrollTop;
  }

  #below() {
    return this.#frame.scrollHeight - this.#frame.scrollTop - this.#frame.clientHeight;
  }
}
