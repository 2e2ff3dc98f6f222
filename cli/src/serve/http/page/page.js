// A chat with the server that sent this page. Texts of models only ever become text nodes, never HTML.
import { areKept, chats, forget, keep, picturesOf, setKept, textOf } from "./chats.js";
import { Markdown } from "./markdown.js";

const element = (id) => document.getElementById(id);
const [model, messages, error, status, form, prompt, send, stop, again, system, key, pictures, add, files] =
  ["model", "messages", "error", "status", "form", "prompt", "send", "stop", "again", "system", "key", "pictures", "add", "files"]
    .map(element);
const KEY = "ruvllm-api-key";
/** Of this tab: which chat it shows after a reload. */
const CHAT = "ruvllm-chat";

/** The conversation, as the API takes it. */
let conversation = [];
/** What it is called among the chats that are kept. */
let id = newId();
/** Who has answered in it last. */
let answerer = "";
/** Which message the next one replaces, with all after it. */
let edited = null;
/** Ends the request that runs. */
let running = null;
/** Whether the model reads pictures. */
let seesPictures = false;
/** Those of the next message, as data URLs. */
let chosen = [];

function newId() {
  return `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`;
}

/** A response that is as it should be; otherwise an error with the server's own words. */
async function ask(path, options = {}) {
  const headers = key.value ? { authorization: `Bearer ${key.value}` } : {};
  const response = await fetch(path, { ...options, headers: { "content-type": "application/json", ...headers } });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const wrong = new Error(body?.error?.message ?? `the server answered with status ${response.status}`);
  wrong.status = response.status;
  throw wrong;
}

function complain(wrong) {
  error.textContent = wrong.status ? wrong.message : `The server cannot be reached: ${wrong.message}`;
  error.hidden = false;
  if (wrong.status === 401) {
    element("settings").open = true;
    key.focus();
  }
}

/** The model and its adapters; asks again while the model is being loaded. */
async function listModels() {
  try {
    const { data } = await (await ask("v1/models")).json();
    const chosen = model.value;
    model.replaceChildren(...data.map(({ id }) => new Option(id, id, false, id === chosen)));
    // Of several models, one that is not loaded is when it is asked for.
    const isLoaded = data.find(({ id }) => id === model.value)?.status.value === "loaded";
    const props = isLoaded && await (await ask(`props?model=${encodeURIComponent(model.value)}`)).json();
    element("base").hidden = !props?.is_base_model;
    const defaults = props?.default_generation_settings?.params ?? {};
    for (const input of document.querySelectorAll("[data-field]")) {
      const value = defaults[input.dataset.field];
      input.placeholder = value === undefined || value === null ? "" : String(value);
    }
    seesPictures = Boolean(props?.modalities?.vision);
    add.hidden = !seesPictures;
    error.hidden = true;
    status.textContent = "Ready.";
  } catch (wrong) {
    if (wrong.status !== 503) return complain(wrong);
    status.textContent = "The model is being loaded.";
    setTimeout(listModels, 1000);
  }
}

function button(text, act) {
  const made = Object.assign(document.createElement("button"), { type: "button", textContent: text });
  made.addEventListener("click", act);
  return made;
}

/** Copies a text; where the browser allows that to encrypted pages alone, by its older way. */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const field = Object.assign(document.createElement("textarea"), { value: text });
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  status.textContent = "Copied.";
}

/** A message of the conversation on the page: where its text and the rest go. */
function show(role) {
  const make = (tag, of, text = "") => Object.assign(document.createElement(tag), { className: of, textContent: text });
  const item = make("li", role);
  const thoughts = make("details", "thinking");
  thoughts.hidden = true;
  thoughts.append(make("summary", "", "Reasoning"), make("div", "thoughts"));
  const [text, figures, tools] = [make("div", "text"), make("p", "figures"), make("p", "tools")];
  const place = () => [...messages.children].indexOf(item);
  tools.append(button("Copy", () => copy(textOf(conversation[place()]))));
  if (role === "user") tools.append(button("Edit", () => edit(place())));
  item.append(make("h2", "", role === "user" ? "You" : answerer || "Model"), thoughts, text, figures, tools);
  messages.append(item);
  element("start").hidden = true;
  return { item, thoughts, text, figures };
}

/** A message that is there as a whole. */
function showMessage(message) {
  const { text } = show(message.role);
  picturesOf(message).forEach((url) => append(text, picture(url)));
  if (message.role === "assistant") new Markdown(text).show(textOf(message));
  else append(text, textOf(message));
}

/** Puts a message back into the field, to be sent in its own place. */
function edit(place) {
  if (running) return;
  edited = place;
  prompt.value = textOf(conversation[place]);
  chosen = picturesOf(conversation[place]);
  showChosen();
  [...messages.children].forEach((item, i) => item.classList.toggle("replaced", i >= place));
  status.textContent = "Sending replaces this message and what follows; Escape leaves them.";
  prompt.focus();
}

function endEdit() {
  edited = null;
  [...messages.children].forEach((item) => item.classList.remove("replaced"));
}

/** The conversation from its first messages on the page. */
function showAll() {
  messages.replaceChildren();
  element("start").hidden = conversation.length > 0;
  conversation.forEach(showMessage);
  messages.scrollTop = messages.scrollHeight;
  update();
}

/** Keeps the conversation, if it is one. */
function save() {
  sessionStorage.setItem(CHAT, id);
  if (conversation.length > 0) {
    const title = textOf(conversation[0]).slice(0, 80);
    const isKept = keep({ id, title, time: Date.now(), model: answerer, messages: conversation });
    if (!isKept) status.textContent += " There is no room to keep all of this chat.";
  } else {
    forget(id);
  }
  listChats();
}

/** The chats that are kept, each with a way to remove it. */
function listChats() {
  const all = chats();
  element("kept").checked = areKept();
  element("none").hidden = all.length > 0;
  element("chats").replaceChildren(...all.map((chat) => {
    const item = document.createElement("li");
    const open = button(chat.title || "Without a title", () => change(chat));
    const remove = button("Delete", async () => {
      // What is being answered is kept once more when it ends.
      if (chat.id === id) await change();
      forget(chat.id);
      listChats();
    });
    open.title = new Date(chat.time).toLocaleString();
    remove.ariaLabel = `Delete ${chat.title}`;
    if (chat.id === id) open.ariaCurrent = "true";
    item.append(open, remove);
    return item;
  }));
}

/** Goes on with a chat that is kept, or begins a new one. */
async function change(chat = null) {
  running?.abort();
  // The end of what runs comes first.
  while (running) await new Promise((done) => setTimeout(done, 10));
  // Its end may have been kept meanwhile.
  chat = chat && (chats().find((kept) => kept.id === chat.id) ?? chat);
  conversation = chat?.messages ?? [];
  answerer = chat?.model ?? "";
  id = chat?.id ?? newId();
  sessionStorage.setItem(CHAT, id);
  endEdit();
  chosen = [];
  showChosen();
  error.hidden = true;
  element("history").open = false;
  status.textContent = chat ? "" : "New chat.";
  showAll();
  listChats();
  prompt.focus();
}

/** Appends text, or has it done, and keeps the end in sight of whoever was there. */
function append(node, text) {
  const atEnd = messages.scrollHeight - messages.scrollTop - messages.clientHeight < 40;
  if (typeof text === "function") text();
  else node.append(text);
  if (atEnd) messages.scrollTop = messages.scrollHeight;
}

/** A picture on the page. */
function picture(url) {
  return Object.assign(document.createElement("img"), { src: url, alt: "Picture" });
}

/** Shows the pictures of the next message, each with a way to take it back. */
function showChosen() {
  pictures.hidden = chosen.length === 0;
  pictures.replaceChildren(...chosen.map((url, i) => {
    const remove = Object.assign(document.createElement("button"), { type: "button", textContent: "Remove" });
    remove.addEventListener("click", () => {
      chosen.splice(i, 1);
      showChosen();
    });
    const item = document.createElement("li");
    item.append(picture(url), remove);
    return item;
  }));
}

/** Takes files that were chosen, dropped or pasted into the next message. Whether there were pictures. */
async function take(list) {
  const images = [...list].filter((file) => file.type.startsWith("image/"));
  if (images.length === 0) return false;
  if (!seesPictures) {
    complain(Object.assign(new Error("This model reads text alone."), { status: 400 }));
    return true;
  }
  const read = (file) => new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(reader.error);
    reader.readAsDataURL(file);
  });
  try {
    chosen.push(...await Promise.all(images.map(read)));
    showChosen();
    status.textContent = `${chosen.length} ${chosen.length === 1 ? "picture" : "pictures"} in the next message.`;
  } catch (failure) {
    complain(Object.assign(new Error(`The picture cannot be read: ${failure.message}`), { status: 400 }));
  }
  return true;
}

/** The objects of a stream of events. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data: ") ? line.slice(6).trim() : "";
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function figuresOf(usage, timings) {
  if (!usage || !timings) return "";
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  return `${usage.completion_tokens} tokens at ${timings.predicted_per_second.toFixed(1)} tokens/s; ` +
    `prompt of ${usage.prompt_tokens} tokens, ${cached} of them from the cache`;
}

function settings() {
  const filled = [...document.querySelectorAll("[data-field]")].filter((input) => input.value !== "");
  return Object.fromEntries(filled.map((input) => [input.dataset.field, Number(input.value)]));
}

/** Asks for the next message of the conversation. */
/** Makes the conversation what it was, and puts a question that was `typed` back. */
function giveBack(before, typed) {
  const question = conversation.at(-1);
  conversation = before;
  showAll();
  if (!typed) return;
  prompt.value ||= textOf(question);
  if (chosen.length === 0) {
    chosen = picturesOf(question);
    showChosen();
  }
}

/** Has the conversation answered. Without an answer it becomes `before` again. */
async function answer(before, typed) {
  const wrong = [...document.querySelectorAll("[data-field]")].find((input) => !input.checkValidity());
  if (wrong) {
    element("settings").open = true;
    giveBack(before, typed);
    save();
    return wrong.reportValidity();
  }
  running = new AbortController();
  error.hidden = true;
  update();
  status.textContent = "Answering …";
  // Nothing is read out before it is complete.
  messages.setAttribute("aria-busy", "true");
  answerer = model.value;
  const shown = show("assistant");
  const instructions = system.value ? [{ role: "system", content: system.value }] : [];
  const markdown = new Markdown(shown.text);
  let [text, usage, timings, reason, isDue] = ["", null, null, null, false];
  // At most once for each picture of the screen, and at once where there is none.
  const draw = () => {
    isDue = false;
    append(shown.text, () => markdown.show(text));
  };
  try {
    const response = await ask("v1/chat/completions", {
      method: "POST",
      signal: running.signal,
      body: JSON.stringify({
        model: model.value, messages: [...instructions, ...conversation], stream: true,
        stream_options: { include_usage: true }, ...settings(),
      }),
    });
    for await (const event of events(response)) {
      if (event.error) throw Object.assign(new Error(event.error.message), { status: event.error.code });
      const choice = event.choices?.[0];
      if (choice?.delta?.reasoning_content) {
        shown.thoughts.hidden = false;
        append(shown.thoughts.lastChild, choice.delta.reasoning_content);
      }
      if (choice?.delta?.content) {
        text += choice.delta.content;
        if (!isDue) {
          isDue = true;
          setTimeout(draw, 30);
        }
      }
      reason = choice?.finish_reason ?? reason;
      [usage, timings] = [event.usage ?? usage, event.timings ?? timings];
    }
    const cut = reason === "length" ? "Cut off: the limit of tokens was reached. " : "";
    shown.figures.textContent = cut + figuresOf(usage, timings);
    status.textContent = "Done.";
  } catch (failure) {
    if (failure.name === "AbortError") {
      shown.figures.textContent = status.textContent = "Stopped.";
    } else {
      status.textContent = "";
      complain(failure);
    }
  }
  draw();
  if (text || reason) {
    conversation.push({ role: "assistant", content: text });
  } else {
    giveBack(before, typed);
  }
  running = null;
  messages.removeAttribute("aria-busy");
  update();
  save();
}

/** Which buttons do something. */
function update() {
  [send.disabled, stop.disabled] = [running !== null, running === null];
  again.disabled = running !== null || conversation.length === 0;
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const text = prompt.value.trim();
  if (running || !text) return;
  const images = chosen.map((url) => ({ type: "image_url", image_url: { url } }));
  const content = images.length > 0 ? [...images, { type: "text", text }] : text;
  const before = conversation;
  conversation = [...before];
  if (edited !== null) {
    conversation = before.slice(0, edited);
    [...messages.children].slice(edited).forEach((item) => item.remove());
    endEdit();
  }
  conversation.push({ role: "user", content });
  showMessage(conversation.at(-1));
  save();
  prompt.value = "";
  chosen = [];
  showChosen();
  answer(before, true);
});

prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    form.requestSubmit();
  }
});

prompt.addEventListener("paste", (event) => {
  const { files: pasted } = event.clipboardData;
  if ([...pasted].some((file) => file.type.startsWith("image/"))) {
    event.preventDefault();
    take(pasted);
  }
});

// A file that is dropped beside the field must not take the page's place.
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
  event.preventDefault();
  take(event.dataTransfer.files);
});

add.addEventListener("click", () => files.click());
files.addEventListener("change", async () => {
  await take(files.files);
  files.value = "";
  prompt.focus();
});

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (running) return running.abort();
  if (edited !== null) {
    endEdit();
    prompt.value = status.textContent = "";
    chosen = [];
    return showChosen();
  }
  for (const panel of document.querySelectorAll(".panel[open]")) {
    panel.open = false;
    panel.firstElementChild.focus();
  }
});

stop.addEventListener("click", () => {
  running?.abort();
  prompt.focus();
});

again.addEventListener("click", () => {
  endEdit();
  const before = conversation;
  if (before.at(-1).role === "assistant") {
    conversation = before.slice(0, -1);
    messages.lastChild.remove();
  }
  prompt.focus();
  answer(before, false);
});

element("new").addEventListener("click", () => change());

for (const example of document.querySelectorAll("#start button")) {
  example.addEventListener("click", () => {
    prompt.value = example.textContent;
    prompt.focus();
  });
}

element("kept").addEventListener("change", () => {
  setKept(element("kept").checked);
  save();
});

// Of the two panels one is open.
for (const panel of document.querySelectorAll(".panel")) {
  panel.addEventListener("toggle", () => {
    if (panel.open) document.querySelectorAll(".panel").forEach((other) => { if (other !== panel) other.open = false; });
  });
}

// What another tab keeps is seen here.
addEventListener("storage", listChats);

model.addEventListener("change", listModels);

key.addEventListener("change", () => {
  sessionStorage.setItem(KEY, key.value);
  listModels();
});

key.value = sessionStorage.getItem(KEY) ?? "";
const last = chats().find((chat) => chat.id === sessionStorage.getItem(CHAT));
if (last) [conversation, id, answerer] = [last.messages, last.id, last.model ?? ""];
showAll();
listChats();
listModels();
