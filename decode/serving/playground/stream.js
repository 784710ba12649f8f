/** The client of the server: the models it has, and streamed completions. */

export class ApiError extends Error {
  constructor(message, { status = 0, param = null, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.param = param;
    this.retryAfter = retryAfter;
  }
}

function headers(key) {
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

/** A response that is not an error; throws ApiError. */
async function request(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("the server does not answer");
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  throw new ApiError(body.error?.message ?? `the server answered ${response.status}`, {
    status: response.status,
    param: body.error?.param,
    retryAfter: response.headers.get("Retry-After"),
  });
}

export async function fetchModels(key, signal) {
  const response = await request("v1/models", { headers: headers(key), signal });
  return (await response.json()).data;
}

/** The data of each server-sent event in a stream of bytes, however these are cut. */
export async function* readEvents(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
      rest = lines.pop();
      for (const line of lines.map((text) => text.replace(/\r$/, ""))) {
        if (line.startsWith("data:")) {
          data.push(line.slice(5).replace(/^ /, ""));
        } else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // the connection may be gone already
  }
}

/** The chunks of a completion: { text, tokens, round, stats }. Throws ApiError, and AbortError on the signal. */
export async function* complete(path, body, { key, signal }) {
  const response = await request(path, { method: "POST", headers: headers(key), body: JSON.stringify(body), signal });
  try {
    for await (const data of readEvents(response.body)) {
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.message, { status: response.status });
      for (const choice of event.choices) yield asChunk(choice);
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ApiError) throw error;
    throw new ApiError("the connection was lost", { status: response.status });
  }
  throw new ApiError("the connection closed early", { status: response.status });
}

function asChunk(choice) {
  const { tokens = [], round = null, stats = null } = choice.draftsmith ?? {};
  return { text: choice.delta?.content ?? choice.text ?? "", tokens, round, stats };
}
