// Calls to the server, with the key if one was given; events of a stream as they come.

const KEY = "pagebus.key";

/** The server's address: the folder of the page, which a proxy may have put below a path. */
export const SERVER = new URL(".", document.baseURI).href.replace(/\/$/, "");

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (text) => (text ? sessionStorage.setItem(KEY, text) : sessionStorage.removeItem(KEY)),
};

export class ApiError extends Error {
  constructor(message, status, retryAfterS = null) {
    super(message);
    this.status = status;
    this.retryAfterS = retryAfterS;
  }
}

const listeners = new Set();

/** Be told when a key is needed, or another one. */
export function onUnauthorized(listener) {
  listeners.add(listener);
}

/** A response that is well, of a path of the server or an address. Raises ApiError with the server's own words otherwise. */
export async function request(path, { json, headers = {}, ...options } = {}) {
  const all = new Headers(headers);
  if (key.get()) all.set("Authorization", `Bearer ${key.get()}`);
  if (json !== undefined) {
    all.set("Content-Type", "application/json");
    options.body = JSON.stringify(json);
    options.method ??= "POST";
  }
  let response;
  try {
    response = await fetch(path.startsWith("/") ? SERVER + path : path, { ...options, headers: all, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.", 0);
  }
  if (response.ok) return response;
  if (response.status === 401) listeners.forEach((listener) => listener());
  throw new ApiError(await messageOf(response), response.status, Number(response.headers.get("Retry-After")) || null);
}

async function messageOf(response) {
  try {
    const body = await response.json();
    return body.error?.message ?? body.message ?? `The server answered ${response.status}.`;
  } catch {
    return `The server answered ${response.status}.`;
  }
}

export async function getJson(path, options) {
  return (await request(path, options)).json();
}

/** The events of a text/event-stream: { event, data, id }. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch(broken);
      if (done) return;
      text += value;
      let end;
      while ((end = text.indexOf("\n\n")) >= 0) {
        const found = parse(text.slice(0, end));
        text = text.slice(end + 2);
        if (found.data !== null) yield found;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** In our words: each browser has its own. */
function broken(error) {
  throw error.name === "AbortError" ? error : new ApiError("The connection to the server broke.", 0);
}

function parse(block) {
  const found = { event: "message", data: null, id: null };
  for (const line of block.split("\n")) {
    const colon = line.indexOf(":");
    const [name, value] = [line.slice(0, colon), line.slice(colon + 1).replace(/^ /, "")];
    if (name === "data") found.data = found.data === null ? value : `${found.data}\n${value}`;
    else if (name in found) found[name] = value;
  }
  return found;
}
