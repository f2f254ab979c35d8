// Chats that are kept in this browser, each under a name of its own; the oldest go when there is no room.

const PREFIX = "pagebus.chat.";
const KEPT = 50;

export function newId() {
  return [...crypto.getRandomValues(new Uint8Array(8))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** What a chat is called: what was asked first. */
export function titleOf(chat) {
  const first = chat.turns.find((turn) => turn.role === "user")?.content ?? "";
  return first.length > 80 ? `${first.slice(0, 79)}…` : first;
}

/** All that are kept, the newest first. */
export function chats() {
  const names = Object.keys(localStorage).filter((name) => name.startsWith(PREFIX));
  return names.map((name) => load(name.slice(PREFIX.length))).filter(Boolean).sort((a, b) => b.savedMs - a.savedMs);
}

export function load(id) {
  try {
    const chat = JSON.parse(localStorage.getItem(PREFIX + id));
    return chat && Array.isArray(chat.turns) ? chat : null;
  } catch {
    return null;
  }
}

/** Keep a chat as it is now; false if there is no room for it, even without all others. */
export function store(chat) {
  if (!chat.turns.length) return true;
  const text = JSON.stringify({ ...chat, savedMs: Date.now() });
  const others = chats().filter((each) => each.id !== chat.id);
  for (const old of others.slice(KEPT - 1)) remove(old.id);
  for (let left = others.slice(0, KEPT - 1); ; left = left.slice(0, -1)) {
    try {
      localStorage.setItem(PREFIX + chat.id, text);
      return true;
    } catch {
      if (!left.length) return false;
      remove(left.at(-1).id);
    }
  }
}

export function remove(id) {
  localStorage.removeItem(PREFIX + id);
}
