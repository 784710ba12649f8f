/** Tokens on the page: marked by where they came from, and explained in a popover. */

const SHADES = 6;

/** Numbers the variants, so that each keeps its colour. */
export class Palette {
  constructor() {
    this.reset([]);
  }

  reset(variants) {
    this.variants = new Map(variants.map(({ name, alpha }) => [name, alpha]));
  }

  /** The class that colours an accepted token. */
  shade(variant) {
    if (variant === "lookup") return "lookup";
    if (!this.variants.has(variant)) this.variants.set(variant, null);
    return `shade-${[...this.variants.keys()].indexOf(variant) % SHADES}`;
  }

  nameOf(variant) {
    const alpha = this.variants.get(variant);
    return alpha == null ? variant : `${variant} (alpha ${alpha})`;
  }
}

function element(tag, text = "", className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  made.className = className;
  return made;
}

/** White space made visible. */
function visible(text) {
  return text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥");
}

function classesOf(token, palette) {
  const classes = ["token", token.source];
  if (token.source === "accepted") classes.push(palette.shade(token.variant));
  return classes.join(" ");
}

/** Writes tokens as spans. Those without characters of their own yet share the span of the token that brings them. */
export class TokenWriter {
  spans = [];
  groups = new Map(); // span -> its tokens
  held = [];

  constructor(container, palette) {
    this.container = container;
    this.palette = palette;
  }

  clear() {
    this.container.replaceChildren();
    this.groups.clear();
    this.spans = [];
    this.held = [];
  }

  write(tokens) {
    const follow = this.atEnd();
    for (const token of tokens) {
      this.held.push(token);
      if (token.text) this.flush();
    }
    if (follow) this.container.scrollTop = this.container.scrollHeight;
  }

  /** Show the tokens at the end that brought no characters: a stop string's, or the end of the sequence. */
  finish() {
    if (this.held.length) this.flush().classList.add("silent");
  }

  flush() {
    const last = this.held.at(-1);
    const span = element("span", last.text, classesOf(last, this.palette));
    span.classList.toggle("breaks", /^\s*\n\s*$/.test(last.text));
    this.groups.set(span, this.held);
    this.spans.push(span);
    this.container.append(span);
    this.held = [];
    return span;
  }

  /** Whether the reader is at the end of the text, and not at one of its tokens. */
  atEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.container;
    return scrollHeight - scrollTop - clientHeight < 40 && !this.container.contains(document.activeElement);
  }
}

/** A TokenWriter whose tokens can be looked into: by pointer, by tap, and by arrow keys from a single tab stop. */
export class TokenExplorer extends TokenWriter {
  current = null; // the tab stop
  anchor = null; // the token that the popover explains
  hiding = null;

  constructor(container, popover, palette) {
    super(container, palette);
    this.popover = popover;
    container.addEventListener("pointerover", ({ target }) => this.show(target));
    container.addEventListener("pointerleave", () => this.hideSoon());
    container.addEventListener("focusin", ({ target }) => this.choose(target));
    container.addEventListener("focusout", () => this.hide());
    container.addEventListener("keydown", (event) => this.move(event));
    popover.addEventListener("pointerenter", () => clearTimeout(this.hiding));
    popover.addEventListener("pointerleave", () => this.hideSoon());
    for (const change of ["scroll", "resize"]) {
      window.addEventListener(change, () => this.place(), { capture: true, passive: true });
    }
  }

  clear() {
    super.clear();
    this.current = null;
    this.hide();
  }

  flush() {
    const span = super.flush();
    span.tabIndex = -1;
    if (!this.current) this.choose(span, false);
    return span;
  }

  /** Make a token the tab stop. */
  choose(span, show = true) {
    if (!this.groups.has(span)) return;
    if (this.current) {
      this.current.tabIndex = -1;
      this.current.removeAttribute("role");
      this.current.removeAttribute("aria-describedby");
    }
    this.current = span;
    span.tabIndex = 0;
    span.setAttribute("role", "button");
    span.setAttribute("aria-describedby", this.popover.id);
    if (show) this.show(span);
  }

  move(event) {
    const at = this.spans.indexOf(this.current);
    const last = this.spans.length - 1;
    const next = {
      ArrowRight: () => Math.min(at + 1, last),
      ArrowLeft: () => Math.max(at - 1, 0),
      ArrowDown: () => this.lineFrom(at, 1),
      ArrowUp: () => this.lineFrom(at, -1),
      Home: () => 0,
      End: () => last,
    }[event.key];
    if (!next || at < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    this.spans[next()].focus();
  }

  /** The token nearest to token `at` in the next line, or the previous one. */
  lineFrom(at, direction) {
    const from = this.spans[at].getBoundingClientRect();
    let best = at;
    let line = null;
    let least = Infinity;
    for (let i = at + direction; this.spans[i]; i += direction) {
      const { left, top } = this.spans[i].getClientRects()[0];
      if (Math.abs(top - from.top) < 4) continue;
      line ??= top;
      if (Math.abs(top - line) > 4) break;
      if (Math.abs(left - from.left) < least) [best, least] = [i, Math.abs(left - from.left)];
    }
    return best;
  }

  show(span) {
    if (!this.groups.has(span)) return;
    clearTimeout(this.hiding);
    this.anchor?.classList.remove("shown");
    this.anchor = span;
    span.classList.add("shown");
    this.popover.replaceChildren(...this.groups.get(span).map((token) => describe(token, this.palette)));
    this.popover.hidden = false;
    this.place();
  }

  /** Soon, not at once: the pointer may be on its way to the popover. The focused token is then shown again. */
  hideSoon() {
    clearTimeout(this.hiding);
    this.hiding = setTimeout(() => {
      const focused = document.activeElement;
      if (this.groups.has(focused)) this.show(focused);
      else this.hide();
    }, 150);
  }

  hide() {
    clearTimeout(this.hiding);
    this.anchor?.classList.remove("shown");
    this.anchor = null;
    this.popover.hidden = true;
  }

  place() {
    if (!this.anchor) return;
    const room = this.container.getBoundingClientRect();
    const at = this.anchor.getClientRects()[0];
    if (at.bottom < room.top || at.top > room.bottom) return this.hide();
    const { width, height } = this.popover.getBoundingClientRect();
    const [margin, gap] = [8, 6];
    const left = Math.max(margin, Math.min(at.left, document.documentElement.clientWidth - width - margin));
    const below = at.bottom + gap;
    const top = below + height + margin <= window.innerHeight ? below : Math.max(margin, at.top - gap - height);
    this.popover.style.left = `${left}px`;
    this.popover.style.top = `${top}px`;
  }
}

const SOURCES = {
  accepted: "drafted, and accepted by the model",
  correction: "correction: the model's own, in place of a draft token",
  bonus: "bonus: the model's own, after all drafted were accepted",
  ar: "plain decoding: the model's own, nothing was drafted",
};

function probability(value) {
  if (value == null) return "none";
  return value > 0 && value < 0.0005 ? "below 0.001" : value.toFixed(3);
}

function describe(token, palette) {
  const box = element("div", "", "token-facts");
  const title = element("p", "", "token-title");
  title.append(element("code", token.text ? visible(token.text) : "no characters"),
    element("span", `id ${token.id}`, "soft"));
  const facts = element("dl");
  const add = (name, value) => facts.append(element("dt", name), value instanceof Node ? value : element("dd", value));
  add("Source", SOURCES[token.source] ?? token.source);
  add("Variant", token.variant ? palette.nameOf(token.variant) : "none");
  add("p (model)", probability(token.p));
  add("q (draft)", probability(token.q));
  if (token.replaced?.length) {
    const thrown = element("dd", "", "replaced");
    thrown.append(...token.replaced.map((text) => element("del", visible(text))));
    add("Rejected draft", thrown);
  }
  box.append(title, facts);
  return box;
}

/** What the marks mean. */
export function fillLegend(list, palette) {
  const sample = (className, text) => element("span", text, `token ${className}`);
  const item = (samples, meaning) => {
    const made = element("li");
    made.append(...samples, element("span", meaning));
    return made;
  };
  const drafts = [...palette.variants.keys()].map((name) =>
    sample(`accepted ${palette.shade(name)}`, palette.nameOf(name)));
  list.replaceChildren(
    ...(drafts.length ? [item(drafts, "drafted by this variant of the draft, accepted by the model")] : []),
    item([sample("accepted lookup", "lookup")], "copied from the text so far, accepted by the model"),
    item([sample("correction", "correction")], "the model's own, where it rejected a draft token"),
    item([sample("bonus", "bonus")], "the model's own, after all drafted tokens were accepted"),
    item([sample("ar", "plain")], "the model's own, where nothing was drafted"),
  );
}
