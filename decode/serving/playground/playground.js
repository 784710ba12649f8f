/** The page: one run or one race at a time, shown as it streams. */

import { makeCharts } from "./charts.js";
import { Meter } from "./meter.js";
import { Race } from "./race.js";
import { Settings, labelOf } from "./settings.js";
import { ApiError, complete, fetchModels } from "./stream.js";
import { Palette, TokenExplorer, fillLegend } from "./tokens.js";

const at = (id) => document.getElementById(id);

const form = at("controls");
if (matchMedia("(max-width: 62rem)").matches) at("decoding").open = false; // the answer is below it
const settings = new Settings(form);
const palette = new Palette();
const answer = new TokenExplorer(at("output"), at("token-popover"), palette);
const charts = makeCharts(at("chart-window"), at("chart-acceptance"), at("chart-alpha"));
const race = new Race({
  panel: at("race-panel"),
  note: at("race-note"),
  result: at("race-result"),
  policyLane: at("lane-policy"),
  plainLane: at("lane-plain"),
  controls: at("replay-controls"),
  replay: at("replay"),
  speed: () => Number(document.querySelector("input[name=speed]:checked").value),
}, palette);

let models = null;
let running = null; // the AbortController of what runs

function say(text) {
  at("status").textContent = text;
}

function showError(text) {
  at("error").textContent = text;
  at("error").hidden = !text;
}

// The models, and what depends on the chosen one.

async function loadModels(signal) {
  models = await fetchModels(settings.apiKey, signal);
  fillSelect(form.elements.model, models.map(({ id }) => [id, id]), models[0].id);
  useModel();
}

function chosenModel() {
  return models.find(({ id }) => id === form.elements.model.value);
}

function fillSelect(select, options, fallback) {
  select.replaceChildren(...options.map(([value, text]) => new Option(text, value)));
  select.value = settings.saved[select.name] ?? fallback;
  if (select.selectedIndex < 0) select.value = fallback;
}

function useModel() {
  const { max_model_len, draftsmith } = chosenModel();
  const { default_policy, policies, variants, chat } = draftsmith;
  const options = policies.map((policy) => [policy, policy === default_policy ? `${policy} (default)` : policy]);
  fillSelect(form.elements.policy, [...options, ["", "other"]], default_policy);
  usePolicy();
  form.elements.max_tokens.max = max_model_len;
  at("prompt-label").textContent = chat ? "Prompt" : "Text to continue";
  at("system-fold").hidden = !chat;
  at("alpha-figure").hidden = !variants.length;
  palette.reset(variants);
  fillLegend(at("legend"), palette);
}

function usePolicy() {
  const other = form.elements.policy.value === "";
  at("policy-other-field").hidden = !other;
  form.elements.policy_other.disabled = !other;
}

// Figures.

const orDash = (value, digits, unit = "") => (value == null ? "–" : value.toFixed(digits) + unit);

function showFigures(meter) {
  const { acceptance, perStep, first, seconds, emitted, accepted, rejected } = meter.figures();
  at("figure-acceptance").textContent = orDash(acceptance, 3);
  at("figure-judged").textContent = `${accepted} of ${accepted + rejected} judged`;
  at("figure-step").textContent = orDash(perStep, 2);
  at("figure-speed").textContent = orDash(emitted && seconds ? emitted / seconds : null, 1);
  at("figure-tokens").textContent = `${emitted} tokens in ${seconds.toFixed(1)} s`;
  at("figure-first").textContent = orDash(first, 2, " s");
  charts.show(meter.rounds);
}

// Runs.

async function stream({ path, body }, signal, take) {
  for await (const chunk of complete(path, body, { key: settings.apiKey, signal })) take(chunk);
}

/** Stream one completion to the answer and its figures, and each chunk to `take`. */
async function decode(request, signal, take) {
  const meter = new Meter();
  answer.clear();
  showFigures(meter);
  try {
    await stream(request, signal, (chunk) => {
      meter.take(chunk);
      take(chunk);
      answer.write(chunk.tokens);
      showFigures(meter);
    });
  } finally {
    answer.finish();
  }
  return meter.figures();
}

async function runOnce(signal) {
  if (!ready()) return;
  say("Waiting for the first token.");
  const { emitted, seconds } = await decode(settings.request(chosenModel()), signal, () => say("Running."));
  say(`Finished: ${emitted} tokens in ${seconds.toFixed(1)} s.`);
}

async function runRace(signal) {
  if (!ready()) return;
  const { path, body } = settings.request(chosenModel());
  if (body.policy === "ar") {
    pointOut(form.elements.policy, "Plain decoding cannot race against itself. Choose a policy other than ar.");
    return;
  }
  let note = "";
  if (body.temperature > 0 && body.seed === null) {
    body.seed = Math.floor(Math.random() * 2 ** 31);
    note = `Two samples would differ by chance, so both lanes use one seed: ${body.seed}.`;
  }
  race.open(body.policy, note);
  try {
    // The server keeps what it has read: whoever ran second would be spared the prompt. Of what else the first run
    // leaves warm, plain decoding is to have the good.
    say("Race: the prompt is read.");
    await stream({ path, body: { ...body, policy: "ar", max_tokens: 1 } }, signal, () => {});
    say(`Race: ${body.policy} runs first.`);
    await race.record(race.ours, (take) => decode({ path, body }, signal, take));
    say("Race: now plain decoding.");
    await race.record(race.plain, (take) => stream({ path, body: { ...body, policy: "ar" } }, signal, take));
  } catch (error) {
    race.abandon();
    throw error;
  }
  say("Race finished.");
  race.close();
}

/**
 * Do `work`, once the models are known, unless something runs already. What is asked for while they are still being
 * fetched takes that fetch's place, with the key as it is by then. What goes wrong is said in words.
 */
async function start(work = () => {}) {
  if (running && models) return;
  running?.abort();
  showError("");
  form.querySelectorAll("[aria-invalid]").forEach((field) => field.removeAttribute("aria-invalid"));
  race.endReplay();
  const mine = new AbortController();
  setRunning(mine);
  try {
    if (!models) await loadModels(mine.signal);
    await work(mine.signal);
  } catch (error) {
    if (running === mine) explain(error);
  } finally {
    if (running === mine) setRunning(null);
  }
}

function setRunning(controller) {
  running = controller;
  at("run").setAttribute("aria-disabled", String(Boolean(running)));
  at("race").setAttribute("aria-disabled", String(Boolean(running)));
  at("stop").setAttribute("aria-disabled", String(!running));
}

function stop() {
  running?.abort();
  race.endReplay();
}

/** Whether the settings can be sent; if not, says why. */
function ready() {
  const problem = settings.problem();
  if (problem) pointOut(problem.field, problem.message);
  return !problem;
}

function pointOut(field, message) {
  for (let fold = field.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
  field.setAttribute("aria-invalid", "true");
  field.focus();
  showError(message);
}

// Errors, with what to do about them.

function explain(error) {
  const field = settings.fieldOf(error.param);
  say(error.name === "AbortError" ? "Stopped." : "");
  if (error.name === "AbortError") return;
  if (!(error instanceof ApiError)) {
    showError("The page itself failed. Reload it, then run again.");
    throw error;
  }
  if (error.status === 401) askForKey();
  else if (field) pointOut(field, `${labelOf(field)}: ${error.message}`);
  else showError(`${sentence(error.message)} ${advice(error)}`);
}

function sentence(text) {
  return text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
}

function advice({ status, retryAfter }) {
  if (status === 0) return "Is it still running? Start it, then run again.";
  if (status === 200) return "The text so far is kept. Run again for a whole answer.";
  if (status === 429) return retryAfter ? `Run again in ${retryAfter} s.` : "Run again in a moment.";
  if (status >= 500) return "Run again; if it stays so, the server's log says more.";
  return "Change the settings, then run again.";
}

function askForKey() {
  const tried = settings.apiKey !== "";
  at("key-field").hidden = false;
  settings.key.focus();
  showError(tried ? "The server refused this API key. Correct it, then run again."
    : "The server asks for an API key. Enter it, then run again.");
}

// Events.

form.addEventListener("submit", (event) => {
  event.preventDefault();
  start(runOnce);
});
form.elements.model.addEventListener("change", useModel);
form.elements.policy.addEventListener("change", usePolicy);
at("stop").addEventListener("click", stop);
at("race").addEventListener("click", () => start(runRace));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    answer.hide();
    stop();
  } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    form.requestSubmit();
  }
});

fillLegend(at("legend"), palette);
start();
