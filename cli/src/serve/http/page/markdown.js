// Markdown as models write it, made into nodes. A text only ever becomes text nodes and a handful of elements without
// attributes of its own: HTML is text, pictures are links, and links lead to the web alone.

/** Lists and quotes inside each other; deeper ones are text. */
const DEPTH = 8;
/** Characters of a paragraph; in longer ones marks are text, as looking for their ends would take long. */
const LONGEST = 20000;
const FENCE = /^ {0,3}(`{3,}(?=[^`]*$)|~{3,})/;
const HEADING = /^ {0,3}(#{1,6})\s(.*)$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(?=\S)/;
const ROW = /^\s*\|.*\|\s*$/;
const COLUMNS = /^\s*\|(\s*:?-+:?\s*\|)+\s*$/;
const URL_ALONE = /^https?:\/\/[^\s<>"'`]*[^\s<>"'`.,;:!?)\]*_]/;

/** A heading's text without the marks that may close it. */
const withoutMarks = (text) => {
  let end = text.length;
  while (text[end - 1] === "#") end -= 1;
  return end === 0 || /\s/.test(text[end - 1]) ? text.slice(0, end).trim() : text;
};

const make = (tag, ...children) => {
  const node = document.createElement(tag);
  node.append(...children);
  return node;
};

/** The lines of a text in blocks, a kind and lines each. Only the last one changes when text is added. */
function blocks(lines) {
  const found = [];
  let i = 0;
  const take = (kind, end) => {
    found.push({ kind, lines: lines.slice(i, end) });
    i = end;
  };
  const until = (from, ends) => {
    while (from < lines.length && !ends(lines[from], from)) from += 1;
    return from;
  };
  const isBlank = (line) => line.trim() === "";
  while (i < lines.length) {
    const line = lines[i];
    const fence = FENCE.exec(line);
    if (isBlank(line)) i += 1;
    else if (fence) {
      const end = until(i + 1, (other) => other.trim().startsWith(fence[1]) && other.trim().replaceAll(fence[1][0], "") === "");
      take("code", Math.min(end + 1, lines.length));
    } else if (HEADING.test(line)) take("heading", i + 1);
    else if (RULE.test(line)) take("rule", i + 1);
    else if (QUOTE.test(line)) take("quote", until(i, (other) => !QUOTE.test(other)));
    else if (ROW.test(line) && COLUMNS.test(lines[i + 1] ?? "")) take("table", until(i, (other) => !ROW.test(other)));
    else if (ITEM.test(line)) {
      // Blank lines belong to it if what follows does: what is indented, and items of the same kind.
      const isNumbered = (other) => /\d/.test(ITEM.exec(other)[2]);
      const goesOn = (other) => /^\s{2,}\S/.test(other) || (ITEM.test(other) && isNumbered(other) === isNumbered(line));
      let end = i + 1;
      for (let j = i + 1; j < lines.length && (isBlank(lines[j]) || goesOn(lines[j])); j += 1) if (!isBlank(lines[j])) end = j + 1;
      take("list", end);
    } else {
      const isOther = (other) => [FENCE, HEADING, RULE, QUOTE, ITEM].some((pattern) => pattern.test(other));
      take("text", until(i + 1, (other) => isBlank(other) || isOther(other)));
    }
  }
  return found;
}

/** The end of marked text that begins at `from`: where `mark` closes it. */
function closing(text, mark, from) {
  for (let at = text.indexOf(mark, from); at > from; at = text.indexOf(mark, at + 1)) {
    // A longer run of the same mark is another one.
    const isAlone = text[at + mark.length] !== mark[0] && (mark.length === 2 || text[at - 1] !== mark[0]);
    if (isAlone && !/\s/.test(text[at - 1])) return at;
  }
  return -1;
}

function link(address, children) {
  const node = make("a", ...children);
  [node.href, node.target, node.rel] = [address, "_blank", "noopener noreferrer"];
  return node;
}

/** Nodes of text inside a block. */
function inline(text, depth = 0) {
  if (text.length > LONGEST || depth > DEPTH) return [text];
  const nodes = [];
  let [plain, i] = ["", 0];
  const push = (node, end) => {
    if (plain) nodes.push(plain);
    nodes.push(node);
    [plain, i] = ["", end];
  };
  while (i < text.length) {
    const rest = text.slice(i, i + 2100);
    const ticks = /^`+/.exec(rest)?.[0];
    const mark = /^(\*\*|__|~~|\*|_)(?=\S)/.exec(rest)?.[0];
    const isInWord = /[\p{L}\p{N}]/u.test(text[i - 1] ?? "");
    const linked = /^!?\[([^\]]{0,1000})\]\(\s*<?([^\s<>()]{0,1000})>?(?:\s+"[^"]{0,100}")?\s*\)/.exec(rest);
    const address = isInWord ? null : URL_ALONE.exec(rest)?.[0];
    const end = ticks ? text.indexOf(ticks, i + ticks.length) : mark ? closing(text, mark, i + mark.length) : -1;
    if (/^\\[!-\/:-@[-`{-~]/.test(rest)) [plain, i] = [plain + text[i + 1], i + 2];
    else if (ticks && end > 0) push(make("code", text.slice(i + ticks.length, end)), end + ticks.length);
    else if (ticks) [plain, i] = [plain + ticks, i + ticks.length];
    else if (mark && end > 0 && !(mark[0] === "_" && isInWord)) {
      const tag = mark === "~~" ? "del" : mark.length === 2 ? "strong" : "em";
      push(make(tag, ...inline(text.slice(i + mark.length, end), depth + 1)), end + mark.length);
    } else if (mark) [plain, i] = [plain + mark, i + mark.length];
    else if (linked && /^https?:\/\//i.test(linked[2])) push(link(linked[2], inline(linked[1], depth + 1)), i + linked[0].length);
    else if (address) push(link(address, [address]), i + address.length);
    else if (text[i] === "\n") push(make("br"), i + 1);
    else {
      // Whatever has no meaning goes at once.
      const next = /^.[^\\`*_~!\[h\n]*/su.exec(rest)[0];
      [plain, i] = [plain + next, i + next.length];
    }
  }
  if (plain) nodes.push(plain);
  return nodes;
}

function list(lines, depth) {
  const [, indent, bullet] = ITEM.exec(lines[0]);
  const node = make(/\d/.test(bullet) ? "ol" : "ul");
  if (/\d/.test(bullet)) node.start = parseInt(bullet, 10);
  const items = [];
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && found[1].length <= indent.length + 1) items.push([line.slice(found[0].length)]);
    else items.at(-1).push(line.replace(/^\s{1,4}/, ""));
  }
  node.append(...items.map((item) => make("li", ...nodes(item, depth + 1, true))));
  return node;
}

function table(lines) {
  const cells = (line, tag) => make("tr", ...line.trim().slice(1, -1).split("|").map((text) => make(tag, ...inline(text.trim()))));
  const [head, , ...rows] = lines;
  return make("table", make("thead", cells(head, "th")), make("tbody", ...rows.map((row) => cells(row, "td"))));
}

/** The node of a block; `tight`: without a paragraph around what is text. */
function node({ kind, lines }, depth, tight) {
  switch (kind) {
    case "code": {
      const [, fence] = FENCE.exec(lines[0]);
      const isClosed = lines.length > 1 && lines.at(-1).trim().startsWith(fence);
      return make("pre", make("code", lines.slice(1, isClosed ? -1 : undefined).join("\n")));
    }
    case "heading": {
      const [, marks, rest] = HEADING.exec(lines[0]);
      const text = withoutMarks(rest.trim());
      // Below those of the page and of the message.
      return make(`h${Math.min(marks.length + 2, 6)}`, ...inline(text));
    }
    case "rule": return make("hr");
    case "quote": return make("blockquote", ...nodes(lines.map((line) => line.replace(QUOTE, "")), depth + 1));
    case "list": return list(lines, depth);
    case "table": return table(lines);
    default: return tight ? make("span", ...inline(lines.join("\n"))) : make("p", ...inline(lines.join("\n")));
  }
}

function nodes(lines, depth = 0, tight = false) {
  if (depth > DEPTH) return [lines.join("\n")];
  return blocks(lines).map((block) => node(block, depth, tight));
}

/** Shows a text that grows in an element: what has been shown and stays as it is keeps its nodes. */
export class Markdown {
  constructor(element) {
    this.element = element;
    this.shown = [];
  }

  show(text) {
    const found = blocks(text.split("\n"));
    const keys = found.map(({ kind, lines }) => `${kind}\n${lines.join("\n")}`);
    let same = 0;
    while (same < keys.length && keys[same] === this.shown[same]) same += 1;
    while (this.element.children.length > same) this.element.lastChild.remove();
    this.element.append(...found.slice(same).map((block) => node(block, 0, false)));
    this.shown = keys;
  }
}
