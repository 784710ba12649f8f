/** The form's values: kept across reloads, checked, and turned into a request. */

const PLACE = "draftsmith.playground";
const KEY_PLACE = "draftsmith.playground.key";
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "repetition_penalty", "presence_penalty",
  "frequency_penalty"];

/** Storage may be switched off or full; the page then works without memory. */
function attempt(action) {
  try {
    return action();
  } catch {
    return null;
  }
}

export class Settings {
  constructor(form) {
    this.form = form;
    this.fields = form.elements;
    this.key = this.fields.key;
    this.saved = attempt(() => JSON.parse(localStorage.getItem(PLACE))) ?? {};
    this.key.value = attempt(() => sessionStorage.getItem(KEY_PLACE)) ?? "";
    for (const [name, value] of Object.entries(this.saved)) {
      const field = this.fields.namedItem(name);
      if (field && field.tagName !== "SELECT") field.value = value; // selects are filled later, from the models
    }
    this.openFolds();
    form.addEventListener("input", () => this.save());
  }

  /** A setting that was changed is not folded away. */
  openFolds() {
    for (const fold of this.form.querySelectorAll("details")) {
      const fields = [...fold.querySelectorAll("input, textarea")];
      fold.open ||= fields.some((field) => field.value !== field.defaultValue);
    }
  }

  save() {
    this.saved = { ...this.saved, ...Object.fromEntries(new FormData(this.form)) };
    attempt(() => localStorage.setItem(PLACE, JSON.stringify(this.saved)));
    attempt(() => sessionStorage.setItem(KEY_PLACE, this.apiKey));
  }

  get apiKey() {
    return this.key.value.trim();
  }

  get policy() {
    return this.fields.policy.value || this.fields.policy_other.value.trim();
  }

  /** The first field that cannot be sent, with what is wrong with it; null if all is well. */
  problem() {
    const field = this.form.querySelector(":is(input, select, textarea):invalid");
    return field && { field, message: `${labelOf(field)}: ${field.validationMessage}` };
  }

  /** The field that a parameter of the API is set by, if any. */
  fieldOf(param) {
    if (param === "messages") return this.fields.prompt;
    if (param === "policy" && !this.fields.policy.value) return this.fields.policy_other;
    return [...NUMBERS, "model", "policy", "prompt", "seed", "stop"].includes(param) ? this.fields[param] : null;
  }

  /** Path and body of the request for a model, as `/v1/models` describes it. */
  request(model) {
    const { prompt, system, seed, stop } = this.fields;
    const body = {
      model: model.id,
      stream: true,
      stream_options: { include_usage: true },
      provenance: true,
      policy: this.policy,
      seed: seed.value === "" ? null : Number(seed.value),
      stop: stop.value.split("\n").filter(Boolean).map((text) => text.replaceAll("\\n", "\n")),
    };
    for (const name of NUMBERS) body[name] = Number(this.fields[name].value);
    if (!model.draftsmith.chat) return { path: "v1/completions", body: { ...body, prompt: prompt.value } };
    const messages = [{ role: "user", content: prompt.value }];
    if (system.value.trim()) messages.unshift({ role: "system", content: system.value });
    return { path: "v1/chat/completions", body: { ...body, messages } };
  }
}

export function labelOf(field) {
  return field.labels[0].textContent;
}
