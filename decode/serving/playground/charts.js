/** Line and bar charts of the rounds, drawn as SVG at the size of their box. */

const HEIGHT = 190;
const LEFT = 44;
const RIGHT = 10;
const TOP = 26;
const BOTTOM = 40;
const LEAST_ROUNDS = 20;

function svg(tag, attributes = {}, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = text;
  return made;
}

/** Round numbers from 0 to `most` or just beyond it, about `count` of them after 0. */
function ticks(most, count) {
  const rough = most / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(1, [1, 2, 5, 10].find((factor) => factor * power >= rough) * power);
  return Array.from({ length: Math.ceil(most / step) + 1 }, (_, i) => i * step);
}

/** One chart. `draw(chart, rounds)` returns its text alternative; `y`: the axis, for the rounds. */
class Chart {
  constructor(box, { empty, y, draw, usable }) {
    Object.assign(this, { box, empty, y, draw, usable });
    this.rounds = [];
    this.picture = svg("svg", { role: "img", height: HEIGHT });
    box.append(this.picture);
    new ResizeObserver(() => this.render()).observe(box);
  }

  show(rounds) {
    this.rounds = rounds;
    this.waiting ??= requestAnimationFrame(() => this.render());
  }

  render() {
    this.waiting = null;
    this.width = this.box.clientWidth;
    if (!this.width) return;
    this.picture.replaceChildren();
    this.picture.setAttribute("width", this.width);
    this.axis = this.y(this.rounds);
    this.most = Math.max(LEAST_ROUNDS, this.rounds.length);
    this.frame();
    const reason = this.rounds.length ? this.usable(this.rounds) : "Run a prompt to see its rounds";
    if (reason) this.note(reason);
    this.picture.setAttribute("aria-label", reason ? `${this.empty}: ${reason}.` : this.draw(this, this.rounds));
  }

  /** The left edge of a round's slot. */
  x(index) {
    return LEFT + ((this.width - LEFT - RIGHT) * index) / this.most;
  }

  at(value) {
    const { from, to } = this.axis;
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - (value - from) / (to - from));
  }

  frame() {
    const right = this.width - RIGHT;
    for (const value of this.axis.ticks) {
      const y = this.at(value);
      this.picture.append(svg("line", { class: "rule", x1: LEFT, x2: right, y1: y, y2: y }));
      this.picture.append(svg("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, this.axis.label(value)));
    }
    for (const value of ticks(this.most, 5).filter((round) => round <= this.most)) {
      const index = Math.max(1, value);
      const x = (this.x(index - 1) + this.x(index)) / 2;
      this.picture.append(svg("text", { x, y: HEIGHT - BOTTOM + 16, "text-anchor": "middle" }, index));
    }
    this.picture.append(svg("text", { x: 0, y: 12 }, this.axis.unit));
    this.picture.append(svg("text", { x: (LEFT + right) / 2, y: HEIGHT - 4, "text-anchor": "middle" }, "round"));
  }

  note(text) {
    const x = (LEFT + this.width - RIGHT) / 2;
    this.picture.append(svg("text", { class: "note", x, y: this.at((this.axis.from + this.axis.to) / 2) + 4,
      "text-anchor": "middle" }, text));
  }

  path(className, steps) {
    if (steps.length) this.picture.append(svg("path", { class: className, d: steps.join("") }));
  }

  bars(className, rounds, height) {
    const gap = this.x(1) - this.x(0) > 4 ? 0.15 : 0;
    this.path(className, rounds.flatMap((round, i) => {
      const [left, right] = [this.x(i + gap), this.x(i + 1 - gap)];
      return height(round) ? `M${left} ${this.at(0)}V${this.at(height(round))}H${right}V${this.at(0)}Z` : [];
    }));
  }
}

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const percent = (share) => `${Math.round(100 * share)} %`;
const isLookup = (round) => round.variant === "lookup";
const nothingDrafted = (rounds) => (rounds.some((round) => round.drafted) ? null : "Nothing was drafted");

function tokensAxis(rounds) {
  const marks = ticks(Math.max(4, ...rounds.map((round) => round.drafted)), 4);
  return { from: 0, to: marks.at(-1), ticks: marks, label: String, unit: "tokens" };
}

function drawWindow(chart, rounds) {
  chart.bars("column drafted", rounds, (round) => round.drafted);
  chart.bars("column accepted", rounds, (round) => !isLookup(round) && round.accepted);
  chart.bars("column lookup", rounds, (round) => isLookup(round) && round.accepted);
  const drafting = rounds.filter((round) => round.drafted);
  return `Bars by round. ${rounds.length} rounds, ${drafting.length} of them with a draft: on average `
    + `${mean(drafting.map((round) => round.drafted)).toFixed(1)} tokens drafted and `
    + `${mean(drafting.map((round) => round.accepted)).toFixed(1)} accepted. `
    + `${rounds.filter(isLookup).length} by lookup.`;
}

function drawAcceptance(chart, rounds) {
  const judged = rounds.flatMap((round, i) => (round.acceptance == null ? [] : [[i + 0.5, round.acceptance]]));
  chart.path("line", judged.map(([i, share], n) => `${n ? "L" : "M"}${chart.x(i)} ${chart.at(share)}`));
  const shares = judged.map(([, share]) => share);
  return `Line of acceptance so far, by round: lowest ${percent(Math.min(...shares))}, highest `
    + `${percent(Math.max(...shares))}, at the end ${percent(shares.at(-1))}.`;
}

function alphaAxis(rounds) {
  const alphas = rounds.flatMap((round) => round.alpha ?? []);
  const [from, to] = [Math.min(0.5, ...alphas), Math.max(1.5, ...alphas)];
  return { from: from - 0.1, to: to + 0.1, ticks: [from, (from + to) / 2, to], label: (value) => value.toFixed(1),
    unit: "alpha" };
}

/** A step line with gaps where no variant drafted; lookup rounds are dots at the foot. */
function drawAlpha(chart, rounds) {
  let before = null;
  const steps = rounds.map(({ alpha }, i) => {
    const command = before == null ? "M" : "L";
    before = alpha;
    return alpha == null ? "" : `${command}${chart.x(i)} ${chart.at(alpha)}H${chart.x(i + 1)}`;
  });
  chart.path("line", steps);
  const foot = chart.at(chart.axis.from) - 3;
  chart.path("dots lookup", rounds.flatMap((round, i) => (isLookup(round) ? `M${chart.x(i + 0.5)} ${foot}h0` : [])));
  const alphas = rounds.flatMap((round) => round.alpha ?? []);
  return `Steps of alpha, the size of the draft, by round: from ${Math.min(...alphas)} to ${Math.max(...alphas)}, on `
    + `average ${mean(alphas).toFixed(2)}. ${rounds.filter(isLookup).length} rounds by lookup, without an alpha.`;
}

const noAlpha = (rounds) => (rounds.some((round) => round.alpha != null) ? null : "No variant drafted");
const shareAxis = () => ({ from: 0, to: 1, ticks: [0, 0.25, 0.5, 0.75, 1], label: (share) => Math.round(100 * share),
  unit: "% accepted" });

/** The page's charts; `show(rounds)` draws them with the next frame. */
export function makeCharts(windowBox, acceptanceBox, alphaBox) {
  const charts = [
    new Chart(windowBox, { empty: "Drafted and accepted tokens by round", y: tokensAxis, draw: drawWindow,
      usable: nothingDrafted }),
    new Chart(acceptanceBox, { empty: "Acceptance so far by round", y: shareAxis, draw: drawAcceptance,
      usable: nothingDrafted }),
    new Chart(alphaBox, { empty: "Alpha by round", y: alphaAxis, draw: drawAlpha, usable: noAlpha }),
  ];
  return { show: (rounds) => charts.forEach((chart) => chart.show(rounds)) };
}
