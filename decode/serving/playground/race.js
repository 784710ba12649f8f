/** Two decodings of one prompt, recorded one after the other and replayed side by side. */

import { TokenWriter } from "./tokens.js";

const asSeconds = (seconds) => `${seconds.toFixed(1)} s`;

function element(tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

/** One side of the race: a stopwatch, the text, and when each piece of it came. */
class Lane {
  constructor(box, palette) {
    this.name = element("h3", "");
    this.clock = element("span", "clock");
    this.bar = element("div", "bar");
    this.body = element("div", "tokens");
    this.body.tabIndex = 0;
    this.body.setAttribute("role", "region");
    this.writer = new TokenWriter(this.body, palette);
    const track = element("div", "track");
    track.append(this.bar);
    const head = element("div", "lane-head");
    head.append(this.name, this.clock);
    box.append(head, track, this.body);
  }

  reset(name) {
    this.name.textContent = name;
    this.body.setAttribute("aria-label", `Text of ${name}`);
    this.clock.textContent = "waiting";
    this.clock.classList.remove("done");
    this.bar.style.width = "0";
    this.writer.clear();
    this.text = "";
    this.emitted = 0;
    this.arrivals = []; // by span, in seconds
    this.seconds = null;
  }

  start() {
    this.started = performance.now();
    this.running = true;
    this.tick();
  }

  get elapsed() {
    return (performance.now() - this.started) / 1000;
  }

  tick() {
    if (!this.running) return;
    this.clock.textContent = asSeconds(this.elapsed);
    requestAnimationFrame(() => this.tick());
  }

  take(chunk) {
    this.text += chunk.text;
    this.emitted += chunk.tokens.length;
    this.writer.write(chunk.tokens);
    while (this.arrivals.length < this.writer.spans.length) this.arrivals.push(this.elapsed);
  }

  finish() {
    this.seconds = this.elapsed;
    this.clock.textContent = asSeconds(this.seconds);
  }

  /** The lane as it was at a moment of the race; `whole`: how long the slower lane took. */
  showAt(moment, whole) {
    const reached = Math.min(moment, this.seconds);
    this.clock.textContent = asSeconds(reached);
    this.clock.classList.toggle("done", moment >= this.seconds);
    this.bar.style.width = `${(100 * reached) / whole}%`;
    let last = null;
    this.writer.spans.forEach((span, i) => {
      span.classList.toggle("future", this.arrivals[i] > moment);
      if (this.arrivals[i] <= moment) last = span;
    });
    this.follow(last);
  }

  follow(span) {
    const end = span ? span.offsetTop + span.offsetHeight - this.body.offsetTop : 0;
    this.body.scrollTop = end - this.body.clientHeight + 12;
  }
}

/** How the race went, in a sentence. */
function verdict(name, ours, plain) {
  const same = ours.text === plain.text;
  const cost = (lane) => (same ? lane.seconds : lane.seconds / lane.emitted);
  const ratio = cost(plain) / cost(ours);
  const compared = ratio >= 1 ? `${ratio.toFixed(2)} times faster` : `${(1 / ratio).toFixed(2)} times slower`;
  const times = `${name}: ${asSeconds(ours.seconds)}, plain: ${asSeconds(plain.seconds)}`;
  if (same) return `${times}: ${compared}; the same text`;
  const place = 1 + firstDifference(ours.text, plain.text);
  return `${times}: ${compared} by the token; the texts differ from character ${place} on, as they can where rounding `
    + "tips a near tie";
}

function firstDifference(one, other) {
  let at = 0;
  while (at < one.length && one[at] === other[at]) at += 1;
  return at;
}

export class Race {
  /** `ui`: panel, note, result, policyLane, plainLane, controls, replay, and `speed()`. */
  constructor(ui, palette) {
    this.ui = ui;
    this.ours = new Lane(ui.policyLane, palette);
    this.plain = new Lane(ui.plainLane, palette);
    this.frame = null;
    ui.replay.addEventListener("click", () => this.replay());
  }

  open(policy, note) {
    this.endReplay();
    this.policy = policy;
    this.ours.reset(policy);
    this.plain.reset("plain decoding");
    this.ui.note.textContent = note;
    this.ui.note.hidden = !note;
    this.ui.result.textContent = "";
    this.ui.controls.hidden = true;
    this.ui.panel.hidden = false;
  }

  /** Record a lane. `decode(take)` streams chunks to `take`. */
  async record(lane, decode) {
    lane.start();
    try {
      await decode((chunk) => lane.take(chunk));
      lane.finish();
    } finally {
      lane.running = false;
    }
  }

  /** The race ended before both lanes had. */
  abandon() {
    for (const lane of [this.ours, this.plain]) {
      if (lane.seconds === null) lane.clock.textContent = "not finished";
    }
  }

  /** Both lanes are recorded: state the result, and replay unless motion is unwanted. */
  close() {
    this.ui.result.textContent = verdict(this.policy, this.ours, this.plain);
    this.ui.controls.hidden = false;
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) this.showEnd();
    else this.replay();
  }

  get whole() {
    return Math.max(this.ours.seconds, this.plain.seconds);
  }

  showAt(moment) {
    for (const lane of [this.ours, this.plain]) lane.showAt(moment, this.whole);
  }

  showEnd() {
    this.showAt(this.whole);
  }

  replay() {
    cancelAnimationFrame(this.frame);
    let moment = 0;
    let before = performance.now();
    const step = () => {
      const now = performance.now();
      moment += ((now - before) / 1000) * this.ui.speed();
      before = now;
      this.showAt(moment);
      this.frame = moment < this.whole ? requestAnimationFrame(step) : null;
    };
    step();
  }

  /** Stop a replay at its end state. */
  endReplay() {
    if (this.frame === null) return;
    cancelAnimationFrame(this.frame);
    this.frame = null;
    this.showEnd();
  }
}
