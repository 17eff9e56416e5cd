// The page asks and shows; what an action makes of a view, the server says. Actions wait in a queue while an answer is
// under way, and go together in the next question: none is lost, and none waits for more than one answer. What came up
// meanwhile without an action, as scores do, is asked for in the next, too.
"use strict";

const $ = (selector) => document.querySelector(selector);
const begin = JSON.parse(document.body.dataset.begin);
let view = null, queue = [], busy = false, stale = false, acted = "", hits = [];

// ---------------------------------------------------------------- questions

// What is refused is said in JSON, or by the guard in plain text; other servers in between send pages.
const post = async (path, body, signal) => {
  const answer = await fetch(path, {
    method: "POST", headers: {"content-type": "application/json"}, signal,
    body: JSON.stringify({...body, models: begin.models}),
  });
  if (answer.ok) return answer;
  const kind = answer.headers.get("content-type") || "", text = await answer.text();
  if (kind.startsWith("text/plain") && text) throw new Error(text);
  let words = "the server did not understand: load the page again";
  try { words = JSON.parse(text).error || words; } catch { /* a page */ }
  throw new Error(words);
};

const ask = async (path, body) => (await post(path, body)).json();

// An answer that comes in lines, each how much is done, the last what was asked for.
const wait = async (path, body, progress, signal) => {
  const answer = await post(path, body, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "", last = {};;) {
    const {value, done} = await reader.read();
    if (done) {
      if (last.error) throw new Error(last.error);
      return last;
    }
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      last = JSON.parse(line);
      if (last.part !== undefined) progress(last.part);
    }
  }
};

const complain = (error) => {
  const words = error instanceof TypeError ? "the server does not answer: is it still running?" : error.message;
  const box = document.createElement("p");
  box.className = "error";
  box.setAttribute("role", "status");
  box.textContent = words;
  $("#said").replaceChildren(box);
};

const act = (name, value = null) => {
  const last = queue.at(-1);
  if (last && last[0] === name && (name === "type" || name === "compare")) last[1] = value;
  else queue.push([name, value]);
  answer();
};

const answer = async (link) => {
  stale = true;
  if (busy) return;
  busy = true;
  $("#panes").setAttribute("aria-busy", true);
  const late = setTimeout(() => { $("#late").hidden = false; }, 400);
  try {
    do {
      stale = false;
      const actions = queue.splice(0);
      const known = sections().map((section) => section.dataset.hash);
      const shown = await ask("show", {view, link: link || "", actions, known}).catch((error) => { complain(error); });
      if (shown) {
        actions.forEach(([name], i) => remember(name, shown.steps[i], i === actions.length - 1 ? shown.query : null));
        if (!actions.length) history.replaceState(state(shown.view), "", address(shown.query));
        show(shown, actions);
      }
    } while (queue.length || stale);
  } finally {
    clearTimeout(late);
    $("#late").hidden = true;
    $("#panes").setAttribute("aria-busy", false);
    busy = false;
  }
};

// Every action is a step to go back to; letters typed one after the other are one, and going back, or what changes
// nothing, is none.
// A view speaks of the models by number: one that was of others is no step to go back to.
const state = (step) => ({view: step, models: begin.models});
const past = (state) => (state && JSON.stringify(state.models) === JSON.stringify(begin.models) ? state.view : null);
const address = (query) => (query ? "?" + query : location.pathname);
const remember = (name, step, query) => {
  const where = query === null ? undefined : address(query), now = past(history.state);
  const types = name === "type" || (name === "compare" && now && now.other !== null && step.other !== null);
  const same = name === "restore" || (types && name === acted) || JSON.stringify(step) === JSON.stringify(now);
  if (same) history.replaceState(state(step), "", where);
  else history.pushState(state(step), "", where);
  acted = name;
};
addEventListener("popstate", (event) => {
  if (past(event.state)) act("restore", past(event.state));
  else location.reload();
});

// ---------------------------------------------------------------- what is shown

const options = (select, pairs, value) => {
  const key = JSON.stringify(pairs);
  if (select.dataset.key !== key) {
    select.replaceChildren(...pairs.map(([words, value]) => new Option(words, value)));
    select.dataset.key = key;
  }
  select.value = value;
};

// What has the focus, and where boxes are scrolled to, outlive what is drawn anew. What had the focus is known by what
// a click on it does, else by its name; if it is gone, the first of its part of the page has the focus.
const focused = () => {
  const one = document.activeElement, half = one.closest("[id^=pane-],#between");
  const part = half && one.closest("section,.cuts");
  if (!part) return [];
  const does = [...one.attributes].filter(({name}) => name.startsWith("data-") && name !== "data-tip");
  const names = (does.length ? does : [...one.attributes].filter(({name}) => name === "aria-label"))
    .map(({name, value}) => `[${name}="${CSS.escape(value)}"]`).join("");
  const at = `#${half.id} .${part.classList[0]}`;
  return [`${at} ${names || one.tagName}`, `${at} [tabindex="0"]`, `${at} button`, at];
};

const sections = () => [...document.querySelectorAll("section[data-hash]")];

const show = (shown, actions) => {
  const focus = focused(), had = new Map(sections().map((section) => [section.dataset.hash, section]));
  const boxes = [...document.querySelectorAll(".pane .text, .grid")].map((box) => [box.scrollTop, box.scrollLeft]);
  view = shown.view;
  $("#said").innerHTML = "";
  if (shown.message) complain(new Error(shown.message[0].toUpperCase() + shown.message.slice(1)));
  $("#panes").innerHTML = shown.panes.map((pane, i) => `<div id="pane-${i}">${pane}</div>`).join("");
  $("#between").innerHTML = shown.difference;
  for (const section of sections().filter((section) => !section.firstChild)) {
    const same = had.get(section.dataset.hash);
    section.replaceWith(same.isConnected ? same.cloneNode(true) : same);
  }
  mark();
  $("#live").textContent = shown.live;
  options($("#models"), shown.choices, view.models[0]);
  options($("#beside select"), [["none", ""], ...shown.choices], view.models.length > 1 ? view.models[1] : "");
  $("#beside").hidden = shown.choices.length < 2;
  options($("#read"), shown.reads, view.read === null ? -1 : view.read);
  options($("#source"), shown.sources, view.source);
  for (const name of ["by", "span"]) $(`#${name} input[value="${view[name]}"]`).checked = true;
  $("#undo").disabled = $("#reset").disabled = !view.cuts.length;
  $("#second").setAttribute("aria-pressed", view.other !== null);
  $("#other").hidden = view.other === null;
  const waiting = new Set(queue.map(([name]) => name)), sent = new Set(actions.map(([name]) => name));
  for (const [name, id, words] of [["type", "#text", view.text], ["compare", "#other", view.other || ""]])
    if (!waiting.has(name) && !(sent.has(name) && document.activeElement === $(id + " textarea")))
      $(id + " textarea").value = words;
  const after = document.querySelectorAll(".pane .text, .grid");
  if (after.length === boxes.length)
    after.forEach((box, i) => { [box.scrollTop, box.scrollLeft] = boxes[i]; });
  for (const box of document.querySelectorAll(".pane .text")) {
    const token = box.querySelector("[aria-pressed=true]");
    const hidden = token.offsetTop < box.scrollTop || token.offsetTop > box.scrollTop + box.clientHeight - 20;
    if (hidden) box.scrollTop = token.offsetTop - box.clientHeight / 2;
  }
  const next = focus.map($).find((one) => one);
  if (!next) return;
  if (next.matches(".cuts,section")) next.tabIndex = -1;
  next.focus({preventScroll: true});
};

// ---------------------------------------------------------------- clicks and keys

const half = (target) => {
  const {place, model} = target.closest("[data-model]").dataset;
  return {place: +place, model: +model};
};

const press = (target) => {
  if (target.dataset.save) return saveFigure(target.closest("section").querySelector("svg:not(.names)"), target);
  if (target.dataset.token !== undefined)
    return act("token", {place: half(target).place, token: +target.dataset.token});
  if (target.dataset.read !== undefined) {
    tip("");
    return act("edge", {...half(target), read: +target.dataset.read, source: +target.dataset.source});
  }
  if (target.dataset.back !== undefined) {
    const {ofRead, ofSource, at} = target.dataset, token = at === undefined ? null : +at;
    return act("edge", {...half(target), read: +ofRead, source: +ofSource, token});
  }
  if (target.dataset.example) return act("example", target.dataset.example);
  if (target.dataset.hit) {
    act("visit", hits[+target.dataset.hit]);
    return scrollTo(0, 0);
  }
  if (target.dataset.score !== undefined)
    return work("score", target, {view, place: half(target).place}, () => answer());
  if (target.dataset.search && view)
    return work("search", target, {view, least: target.dataset.search === "least"}, found);
};

const found = (result) => {
  $("#hits").innerHTML = result.html;
  hits = result.hits;
};

// ---------------------------------------------------------------- work that takes a while

// One of a kind at a time: what is asked for next ends what is under way. It is known by what it is about, since its
// button may be drawn anew meanwhile.
const running = {};

const about = (button) => {
  if (button.dataset.search) return [button.dataset.search, view.models[0], view.read, view.source, view.by].join();
  const {place, model} = half(button);
  return [model, button.dataset.score, place && view.other !== null ? view.other : view.text].join();
};

const mark = () => {
  for (const button of document.querySelectorAll("[data-score],[data-search]")) {
    const one = running[button.dataset.search ? "search" : "score"];
    button.setAttribute("aria-disabled", one !== undefined && one.about === about(button));
  }
};

const work = async (kind, button, body, done) => {
  const mine = {about: about(button), control: new AbortController()}, box = $(`#${kind}-progress`);
  const bar = box.querySelector("progress"), last = () => running[kind] === mine;
  if (running[kind] && running[kind].about === mine.about) return;
  if (running[kind]) running[kind].control.abort();
  running[kind] = mine;
  bar.value = 0;
  box.hidden = false;
  mark();
  try {
    const result = await wait(kind, body, (part) => { if (last()) bar.value = part; }, mine.control.signal);
    if (last()) done(result);
  } catch (error) {
    if (last() && kind === "search") found({html: "", hits: []});
    if (last()) complain(error);
  } finally {
    if (last()) {
      delete running[kind];
      box.hidden = true;
      mark();
    }
  }
};

// Arrow keys move among tokens, bars or cells: left and right in their order, up and down to the nearest of a line.
const CELLS = "[data-token],.cell";
const neighbour = (target, key) => {
  const all = [...target.closest(".text,svg").querySelectorAll(CELLS)];
  const step = {ArrowLeft: -1, ArrowRight: 1}[key], down = {ArrowUp: -1, ArrowDown: 1}[key];
  if (step) return all[all.indexOf(target) + step];
  if (!down) return {Home: all[0], End: all.at(-1)}[key];
  const middle = (one) => {
    const box = one.getClientRects()[0];
    return [box.x + box.width / 2, box.y + box.height / 2];
  };
  const [x, y] = middle(target);
  let nearest, least = Infinity;
  for (const one of all) {
    const [ox, oy] = middle(one), lines = down * (oy - y), far = lines * 1000 + Math.abs(ox - x);
    if (lines > 4 && far < least - 0.5) [nearest, least] = [one, far];
  }
  return nearest;
};

const CLICKED = "[data-token],[data-read],[data-save],[data-back],[data-example],[data-hit],[data-score],[data-search]";
document.addEventListener("click", (event) => {
  const target = event.target.closest(CLICKED);
  if (target) press(target);
});
document.addEventListener("keydown", (event) => {
  if (!event.target.matches(CELLS) || event.ctrlKey || event.altKey || event.metaKey) return;
  const next = neighbour(event.target, event.key);
  if (next) next.focus();
  else if (event.key === "Enter" || event.key === " ") press(event.target);
  else if (!event.key.startsWith("Arrow")) return;
  event.preventDefault();
});

// ---------------------------------------------------------------- words beside the pointer

const tip = (words, x, y) => {
  const box = $("#attnres-tip");
  box.textContent = words || "";
  box.style.display = words ? "block" : "none";
  if (!words) return;
  const size = box.getBoundingClientRect();
  box.style.left = Math.max(4, Math.min(x + 12, innerWidth - size.width - 4)) + "px";
  box.style.top = (y + 18 + size.height > innerHeight ? y - size.height - 10 : y + 18) + "px";
};
let pointed = null;  // the last event that told what is meant
const point = (event) => {
  pointed = event;
  const target = event.target.closest && event.target.closest(`[data-tip],${CELLS}`);
  const box = target && event.type === "focusin" ? target.getBoundingClientRect() : null;
  const words = target && (target.dataset.tip || target.getAttribute("aria-label"));
  tip(words, box ? box.left : event.clientX, box ? box.bottom - 14 : event.clientY);
};
document.addEventListener("mousemove", point);
document.addEventListener("focusin", (event) => { if (event.target.matches(":focus-visible")) point(event); });
document.addEventListener("mouseleave", () => tip(""));
document.addEventListener("focusout", () => tip(""));
// What comes into sight because it has the focus keeps its words.
document.addEventListener("scroll", () => {
  if (pointed && pointed.type === "focusin" && pointed.target === document.activeElement) point(pointed);
  else tip("");
}, {passive: true});

// ---------------------------------------------------------------- files

const saveBlob = (blob, name) => {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
};

// A figure by itself, on the page's paper, its title above it.
const saveFigure = (svg, button) => {
  const style = getComputedStyle(document.documentElement), colour = (name) => style.getPropertyValue(name).trim();
  const box = svg.viewBox.baseVal, copy = svg.cloneNode(true), scale = 3;
  const most = Math.max(8, Math.floor(box.width / 5.4)), lines = [""];
  for (const word of svg.getAttribute("aria-label").split(" ")) {
    if ((lines.at(-1) + word).length > most && lines.at(-1)) lines.push("");
    lines.push(lines.pop() + word + " ");
  }
  const above = 8 + 12 * lines.length, height = box.height + above;
  copy.removeAttribute("style");
  copy.setAttribute("color", colour("--ink"));
  copy.setAttribute("viewBox", `0 ${-above} ${box.width} ${height}`);
  copy.setAttribute("width", box.width * 2);
  copy.setAttribute("height", height * 2);
  const add = (name, place, attributes) => {
    const one = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) one.setAttribute(key, value);
    copy[place](one);
    return one;
  };
  add("rect", "prepend", {y: -above, width: "100%", height: "100%", fill: colour("--paper")});
  lines.forEach((line, i) => {
    const look = {fill: colour("--ink"), "font-size": 9.5, "font-family": "sans-serif"};
    add("text", "append", {x: 4, y: 12 * (i + 1 - lines.length) - 7, ...look}).textContent = line;
  });
  const text = new XMLSerializer().serializeToString(copy).replace(/var\((--[\w-]+)\)/g, (all, name) => colour(name));
  const data = new Blob([text], {type: "image/svg+xml"});
  const name = "attnres-" + (svg.dataset.figure || button.closest("section").className);
  if (button.dataset.save === "svg") return saveBlob(data, name + ".svg");
  const image = new Image();
  image.onload = () => {
    const canvas = document.createElement("canvas");
    canvas.width = box.width * scale;
    canvas.height = height * scale;
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    canvas.toBlob((blob) => saveBlob(blob, name + ".png"), "image/png");
    URL.revokeObjectURL(image.src);
  };
  image.src = URL.createObjectURL(data);
};

// ---------------------------------------------------------------- controls

const copyLink = () => {
  const box = $("#copy").getBoundingClientRect();
  tip("copied", box.left, box.top);
  setTimeout(() => tip(""), 1500);
  const area = document.createElement("textarea");
  const old = () => {
    area.value = location.href;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  };
  if (navigator.clipboard) navigator.clipboard.writeText(location.href).catch(old);
  else old();
};

const setTheme = (dark) => {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  $("#theme").setAttribute("aria-pressed", dark);
};

for (const [name, id] of [["type", "#text"], ["compare", "#other"]]) {
  $(id + " textarea").maxLength = 5 * begin.characters;
  $(id + " textarea").addEventListener("input", (event) => act(name, event.target.value));
}
$("#second").addEventListener("click", () => act("compare", view.other === null ? view.text : null));
for (const id of ["#models", "#beside select"])
  $(id).addEventListener("change", () => act("models", [$("#models").value, $("#beside select").value]
    .filter((number) => number !== "").map(Number)));
for (const id of ["#read", "#source"])
  $(id).addEventListener("change", () => act("colour", [+$("#read").value, $("#source").value]));
for (const name of ["by", "span"])
  $("#" + name).addEventListener("change", (event) => act(name, event.target.value));
$("#undo").addEventListener("click", () => act("undo"));
$("#reset").addEventListener("click", () => act("reset"));
$("#copy").addEventListener("click", copyLink);
$("#json").addEventListener("click", () => ask("export", {view}).then(
  (data) => saveBlob(new Blob([JSON.stringify(data)], {type: "application/json"}), "attnres-view.json"), complain));
$("#theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme !== "dark"));
$("#controls").addEventListener("submit", (event) => event.preventDefault());

setTheme(matchMedia("(prefers-color-scheme: dark)").matches);
$("#search").hidden = begin.corpus === null;
if (past(history.state)) act("restore", past(history.state));
else answer(location.search);
