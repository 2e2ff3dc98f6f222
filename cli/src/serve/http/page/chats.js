// Chats that this browser keeps, the one that was used last first. They leave it only as requests to the server.

const CHATS = "ruvllm-chats";
const OFF = "ruvllm-keeps-no-chats";
/** Chats that are kept; the oldest go. */
const MOST = 50;

export function chats() {
  try {
    const found = JSON.parse(localStorage.getItem(CHATS) ?? "[]");
    return Array.isArray(found) ? found.filter((chat) => typeof chat?.id === "string" && Array.isArray(chat.messages)) : [];
  } catch {
    return [];
  }
}

export const areKept = () => localStorage.getItem(OFF) === null;

/** Whether chats are kept from now on; those that are there go if not. */
export function setKept(kept) {
  if (kept) return localStorage.removeItem(OFF);
  localStorage.setItem(OFF, "1");
  localStorage.removeItem(CHATS);
}

/** Keeps a chat as it is now; without its pictures where they leave no room for others. False if it is not kept whole. */
export function keep(chat) {
  if (!areKept()) return true;
  const others = chats().filter(({ id }) => id !== chat.id).slice(0, MOST - 1);
  const plain = { ...chat, messages: chat.messages.map((message) => ({ ...message, content: textOf(message) })) };
  // A browser has some megabytes for this. Of texts the oldest go.
  for (let kept = chat; ; kept === chat ? (kept = plain) : others.pop()) {
    try {
      localStorage.setItem(CHATS, JSON.stringify([kept, ...others]));
      return kept === chat;
    } catch {
      if (kept === plain && others.length === 0) return false;
    }
  }
}

export function forget(id) {
  const left = chats().filter((chat) => chat.id !== id);
  if (left.length > 0) localStorage.setItem(CHATS, JSON.stringify(left));
  else localStorage.removeItem(CHATS);
}

/** What a message says, without its pictures. */
export const textOf = ({ content }) =>
  typeof content === "string" ? content : content.filter(({ type }) => type === "text").map(({ text }) => text).join("\n");

/** The pictures of a message. */
export const picturesOf = ({ content }) =>
  typeof content === "string" ? [] : content.filter(({ type }) => type === "image_url").map(({ image_url }) => image_url.url);
