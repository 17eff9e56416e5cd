// The view (what is shown, as data) is changed here; the server gives the numbers of a view, and the page draws them.
// While an answer is under way the view goes on changing: the next question asks for the latest, so no click is lost.
"use strict";

const $ = (selector) => document.querySelector(selector);
const begin = JSON.parse(document.body.dataset.begin);
const saved = $("#saved") ? JSON.parse($("#saved").textContent) : null;
const counted = {asks: 0, draws: 0, scores: 0};
let view = null, shown = null, found = null, patched = null, graphed = null, compared = "values", busy = false, again = false, unfolded = new Set(), numbers = false, looked = null;

const escape = (text) => String(text).replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
// Half of a character, which an editor may leave for a moment, is none.
const whole = (text) => text.toWellFormed ? text.toWellFormed() : text;
const number = (value, digits = 3) => value === null || value === undefined ? "–"
  : (+value.toFixed(digits) + 0).toFixed(digits).replace("-", "−");
const signed = (value, digits = 3) => (value > 0 && +value.toFixed(digits) ? "+" : "") + number(value, digits);
const chance = (log) => Math.exp(log);
const prob = (log) => { const p = chance(log); return p < 0.00005 ? "< 0.0001" : number(p, p < 0.1 ? 4 : 3); };
const quoted = (word) => `<b class="mono">“${escape(word)}”</b>`;
// Scales end at 1, 2 or 5 times a power of ten; what is below 0.02 nats stays pale.
const end = (values, least = 0.02) => {
  const most = Math.max(least, ...values.filter((one) => one !== null).map(Math.abs)), ten = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 5, 10].map((one) => one * ten).find((one) => one >= most * 0.999999);
};
const tint = (value, most) => `color-mix(in srgb, var(--${value < 0 ? "less" : "more"}) ${
  Math.round(100 * Math.min(1, Math.sqrt(Math.abs(value) / most)))}%, var(--tint))`;
const ink = (colour) => {
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#000" : "#fff";
};

// ---------------------------------------------------------------- questions

const post = async (path, body, signal) => {
  const answer = await fetch(path, {
    method: "POST", headers: {"content-type": "application/json"}, signal,
    body: JSON.stringify({...body, models: begin.models}),
  });
  if (answer.ok) return answer;
  const kind = answer.headers.get("content-type") || "", text = await answer.text();
  if (kind.startsWith("text/plain") && text) throw new Error(text);
  let words = "the server did not understand: load the page again";
  try { words = JSON.parse(text).error || words; } catch { /* another server's page */ }
  throw new Error(words);
};

// An answer in lines: each how much is done and what there is so far, the last what was asked for.
const lines = async (path, body, progress, signal) => {
  const reader = (await post(path, body, signal)).body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "", last = {};;) {
    const {value, done} = await reader.read();
    if (done) {
      if (last.error) throw new Error(last.error);
      return last;
    }
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    for (const line of parts) {
      last = JSON.parse(line);
      if (last.part !== undefined) progress(last);
    }
  }
};

const complain = (error) => {
  const words = error instanceof TypeError && /fetch|network/i.test(error.message)
    ? "the server does not answer: is it still running?" : error.message;
  $("#said").textContent = words[0].toUpperCase() + words.slice(1);
};

const state = () => ({view, models: begin.models});
const change = (patch, step = true) => {
  view = {...view, ...patch};
  history[step ? "pushState" : "replaceState"](state(), "");
  ask();
};

const ask = async (link) => {
  again = true;
  if (busy || saved) return;
  busy = true;
  document.body.setAttribute("aria-busy", true);
  const late = setTimeout(() => { $("#late").hidden = false; }, 400);
  try {
    while (again) {
      again = false;
      const asked = view;
      // Scores of another prediction are not waited for: the model is needed now.
      if (scoring && scoring.asked !== predicted()) scoring.control.abort();
      counted.asks++;
      const answer = await (await post("show", {view: asked, link: link || ""})).json().catch(complain);
      if (!answer) continue;
      if (view === asked) {
        view = answer.view;
        history.replaceState(state(), "", answer.query ? "?" + answer.query : location.pathname);
        $("#said").textContent = answer.message;
      }
      const before = shown;
      shown = answer;
      if (before && before.view.text !== answer.view.text) unfolded = new Set();
      if (patched && patched.of !== patchOf()) patched = null;
      if (graphed && graphed.of !== scoreOf(answer.panes[0])) graphed = null;
      draw();
    }
  } catch (error) {
    complain(error);
  } finally {
    clearTimeout(late);
    $("#late").hidden = true;
    document.body.setAttribute("aria-busy", false);
    busy = false;
  }
  score();
};

// Scores begin by themselves: gradients at once, measured ones as they arrive. Those of another view end them.
let scoring = null;
const predicted = () => JSON.stringify([view.text, view.models, view.token, view.target, view.against, view.edited && view.cuts]);
const scoreOf = (pane) => JSON.stringify([view.text, pane.model, pane.token, pane.target, pane.against, view.edited && view.cuts]);
const score = async () => {
  const places = shown ? shown.panes.keys() : [];
  for (const place of places) {
    const pane = shown.panes[place];
    if (pane.error || (pane.scores && pane.scores.done)) continue;
    const of = scoreOf(pane);
    if (scoring && scoring.of === of) return;
    if (scoring) scoring.control.abort();
    const mine = scoring = {of, asked: predicted(), control: new AbortController()};
    counted.scores++;
    const take = (scores, done) => {
      const now = shown.panes[place];
      if (scoring !== mine || !now || now.error || scoreOf(now) !== of || !scores) return;
      now.scores = {...scores, done};
      draw();
    };
    try {
      take(await lines("score", {view, place}, ({partial}) => take(partial, false), mine.control.signal), true);
    } catch (error) {
      if (error.name === "AbortError") {
        if (scoring === mine) scoring = null;
        return;
      }
      complain(error);
      if (shown.panes[place] === pane) pane.scores = {...(pane.scores || {}), done: true};
    }
    if (scoring !== mine) return;
    scoring = null;
  }
};

// ---------------------------------------------------------------- what the numbers say

const edgeName = (pane, [r, s]) => `${pane.reads[r].label} ← ${pane.columns[pane.reads[r].sources[s]].label}`;
// In lists a block's layers, which its label has in brackets, are left out.
const shortName = (pane, edge) => edgeName(pane, edge).replace(/ \(L[^)]*\)/g, "");
const isCut = (pane, r, s) => view.cuts.some((cut) => cut.model === pane.model && cut.read === r && cut.source === s);
const effect = (pane, r, s) => {
  const one = pane.scores && pane.scores.gradient;
  if (!one || one[r][s] === null) return null;
  const measured = pane.scores.measured[r][s];
  return {value: measured === null ? one[r][s] : measured, measured: measured !== null};
};
// Every edge of a layer's input with a choice, the largest effect first; measured ones before estimates.
const ranked = (pane) => pane.reads.flatMap((read, r) => read.sources.map((_, s) => ({r, s, ...effect(pane, r, s)})))
  .filter((edge) => edge.value !== undefined && edge.value !== null)
  .sort((a, b) => Math.abs(b.value) - Math.abs(a.value));
const leading = (pane) => {
  const all = ranked(pane), measured = all.filter((edge) => edge.measured);
  return measured.length ? measured : all;
};
const candidate = (pane, id) => pane.next && pane.next.find((one) => one.id === id);
const margin = (pane, field = null) => {
  const key = field || (view.edited && candidate(pane, pane.target).after !== null ? "after" : "before");
  return candidate(pane, pane.target)[key] - (pane.against === null ? 0 : candidate(pane, pane.against)[key]);
};
const worth = (pane, change) => pane.against === null ? `p ${prob(margin(pane) + change)}`
  : `the difference ${signed(margin(pane) + change, 2)}`;
const tipOf = (pane, r, s) => {
  const one = effect(pane, r, s);
  return `${edgeName(pane, [r, s])}: contribution ${number(pane.contributions[r][s])}, weight ${number(pane.weights[r][s])}`
    + (one ? `; when it is cut ln p ${signed(one.value)} (${one.measured ? "measured" : "estimate"})` : "")
    + (isCut(pane, r, s) ? "; cut" : "");
};

const sentence = (pane) => {
  if (!pane.next) return `<p class="say">Where each layer’s input comes from: ${escape(pane.title)}.</p>`;
  const goal = candidate(pane, pane.target), all = leading(pane);
  const name = shown.panes.length > 1 ? `<b>${escape(pane.title)}</b>: ` : "";
  const over = pane.against === null ? `(p ${prob(margin(pane))})`
    : `rather than ${quoted(candidate(pane, pane.against).word)} (ln p ${signed(margin(pane), 2)} apart)`;
  const down = all.filter((one) => one.value < 0), up = all.filter((one) => one.value > 0);
  const sure = all.length && all[0].measured ? "" : "about ";
  const source = (one) => escape(pane.columns[pane.reads[one.r].sources[one.s]].label);
  const at = (one) => escape(pane.reads[one.r].label);
  let text = `${name}The prediction of ${quoted(goal.word)} ${over} `;
  if (!all.length) text += pane.scores && pane.scores.done ? "has no edge that could be cut." : "… its edges are being scored.";
  else if (down.length) {
    const now = worth(pane, 0), then = worth(pane, down[0].value), it = pane.against === null ? "p" : "it";
    const change = now === then ? "hardly changes" : `falls to ${sure}<b>${then.replace(/^p /, "")}</b>`;
    text += `rests most on <b>${source(down[0])}</b>${down[1] && down[1].r === down[0].r ? "" : ` at <b>${at(down[0])}</b>`}`
      + (down[1] ? ` and <b>${source(down[1])}</b> at <b>${at(down[1])}</b>` : "")
      + `: without the first, ${it} ${change}.`;
  } else text += "rests on no single edge: cutting any of them raises it.";
  const loss = pane.loss === null ? "One token: no loss." : `Text loss ${number(pane.loss)} nats per token.`;
  const held = up.length ? `${source(up[0])} at ${at(up[0])} holds it back most (${sure}${worth(pane, up[0].value)} without it). ` : "";
  const cuts = view.edited && pane.loss_cut !== undefined && pane.loss_cut !== null ? "Figures are those with your cuts. " : "";
  return `<p class="say">${text}</p><p class="sub">${held}${cuts}${loss} ${pane.notes.map(escape).join(" ")}</p>`;
};

// ---------------------------------------------------------------- drawing

const WIDE = 14, THIN = 0.03, DEEP = 40, FOLD = 4;

// Columns of the effects: all, or of many the largest and one for the rest.
const columnsOf = (pane) => {
  const all = pane.columns.map((_, c) => c);
  if (all.length <= WIDE || unfolded.has("columns")) return {some: all, rest: []};
  const most = all.map(() => 0);
  pane.reads.forEach((read, r) => read.sources.forEach((c, s) => {
    const one = effect(pane, r, s);
    most[c] = Math.max(most[c], one ? Math.abs(one.value) : Math.abs(pane.contributions[r][s]) * 1e-6);
  }));
  const some = [...all].sort((a, b) => most[b] - most[a]).slice(0, WIDE - 2).sort((a, b) => a - b);
  return {some, rest: all.filter((c) => !some.includes(c))};
};

const stack = (pane, r) => {
  const read = pane.reads[r], row = view.by === "weight" ? pane.weights[r] : pane.contributions[r];
  const total = row.reduce((sum, one) => sum + Math.abs(one), 0) || 1;
  const small = row.length > 12 ? row.map((one, s) => [Math.abs(one) / total < THIN, s]).filter(([thin]) => thin) : [];
  const segment = (s) => {
    const {short, colour} = pane.columns[read.sources[s]], share = Math.abs(row[s]) / total, tip = escape(tipOf(pane, r, s));
    return `<button type="button" tabindex="-1" data-e="${r},${s}" data-m="${pane.model}" class="${isCut(pane, r, s) ? "cut-mark" : ""
      }${row[s] < 0 ? " minus" : ""}" style="width:${100 * share}%;background:${colour};color:${ink(colour)}" data-tip="${tip
      }" aria-label="${tip}">${share > 0.06 ? escape(short) : ""}</button>`;
  };
  const hidden = new Set(small.length > 1 ? small.map(([, s]) => s) : []);
  const others = [...hidden].reduce((sum, s) => sum + row[s], 0);
  return `<span class="stack">${row.map((_, s) => hidden.has(s) ? "" : segment(s)).join("")}${hidden.size
    ? `<span style="flex:1;background:var(--grid)" data-tip="${hidden.size} others: ${number(others)} together">${hidden.size} others</span>` : ""}</span>`;
};

const cells = (pane, r, {some, rest}, most) => {
  const read = pane.reads[r];
  const cell = (c) => {
    const s = read.sources.indexOf(c), one = s < 0 ? null : effect(pane, r, s);
    if (s < 0) return '<span class="none"></span>';
    const tip = escape(tipOf(pane, r, s));
    return `<button type="button" tabindex="-1" data-e="${r},${s}" data-m="${pane.model}" class="cell${isCut(pane, r, s) ? " cut-mark" : ""
      }${one && !one.measured ? " estimate" : ""}" style="background:${one ? tint(one.value, most) : "var(--tint)"}" data-tip="${tip}" aria-label="${tip}"></button>`;
  };
  const others = rest.map((c) => [c, read.sources.indexOf(c)]).filter(([, s]) => s >= 0)
    .map(([c, s]) => [c, effect(pane, r, s)]).filter(([, one]) => one);
  const worst = others.sort((a, b) => Math.abs(b[1].value) - Math.abs(a[1].value))[0];
  return some.map(cell).join("") + (rest.length ? worst
    ? `<span style="background:${tint(worst[1].value, most)};border-radius:2px" data-tip="${others.length} others, the largest: ${
      escape(pane.columns[worst[0]].label)} ${signed(worst[1].value)}"></span>` : '<span class="none"></span>' : "");
};

const groups = (pane) => {
  if (pane.reads.length <= DEEP) return [{key: null, rows: [...pane.reads.keys()]}];
  const made = [];
  pane.reads.forEach((read, r) => {
    const key = read.layer === null ? null : Math.floor(read.layer / FOLD);
    if (!made.length || made.at(-1).key !== key) made.push({key, rows: []});
    made.at(-1).rows.push(r);
  });
  return made;
};

const depth = (pane) => {
  const across = columnsOf(pane), all = ranked(pane), most = end(all.map((one) => one.value));
  const template = `grid-template-columns:repeat(${across.some.length + (across.rest.length ? 1 : 0)},minmax(0,1fr))`;
  const top = pane.scores ? (leading(pane)[0] || {}).r : undefined;
  const likely = pane.lens ? Math.max(...pane.lens.map((one) => one.target), 1e-9) : 1;
  const row = (r, first) => {
    const read = pane.reads[r], lens = pane.lens && pane.lens[r], attends = pane.attends && pane.attends[r];
    return `<tr class="${first ? "first" : ""}"><th class="layer" scope="row"><button type="button" class="plain" data-layer="${r}" aria-pressed="${view.layer === r
    }" data-tip="over all tokens">${escape(read.label)}</button></th><td>${stack(pane, r)}</td>`
      + (pane.next ? `<td><span class="cells" style="${template}">${cells(pane, r, across, most)}</span></td>` : "")
      + (pane.lens ? `<td class="wide"><span class="mono">${escape(lens.word)}</span> <span class="note">${number(lens.p, 2)}</span> <span class="goal" style="--part:${
        (lens.target / likely).toFixed(3)}" data-tip="${escape(`the target's p is ${number(lens.target)} if ${read.label} were the last; KL ${number(lens.kl)} nats`)}"></span></td>` : "")
      + (pane.attends ? `<td class="mono note wide">${(attends || []).map(([t, w]) =>
        `<span data-tip="${escape(`token ${t}: ${number(w)} of the attention, mean over heads`)}">${escape(pane.names[t])}</span>`).join(" ")}</td>` : "") + "</tr>";
  };
  const folded = ({key, rows}) => {
    const open = key === null || unfolded.has(`${pane.model}:${key}`) || (rows.includes(top) && !unfolded.has(`${pane.model}:shut:${key}`));
    if (key === null && rows.length === pane.reads.length)
      return rows.map((r) => row(r, r === 0 || pane.reads[r].layer !== pane.reads[r - 1].layer)).join("");
    if (key === null) return rows.map((r) => row(r, true)).join("");
    const name = `L${key * FOLD}-L${pane.reads[rows.at(-1)].layer}`, strongest = all.find((one) => rows.includes(one.r));
    const head = `<tr class="first"><th class="layer" scope="row"><button type="button" data-fold="${pane.model}:${key}" data-open="${open}" aria-expanded="${open}">${open ? "▾" : "▸"} ${name}</button></th><td colspan="4" class="note">${
      open ? "" : `${rows.length} inputs${strongest ? `; the largest effect is ${escape(edgeName(pane, [strongest.r, strongest.s]))}: ${signed(strongest.value)}` : ""}`}</td></tr>`;
    return head + (open ? rows.map((r) => row(r, false)).join("") : "");
  };
  const heads = across.some.map((c) => `<span class="head" data-tip="${escape(pane.columns[c].label)}">${escape(pane.columns[c].short)}</span>`).join("")
    + (across.rest.length ? `<span class="head">+${across.rest.length}</span>` : "");
  return `<table class="depth"><thead><tr><th class="layer">Layer</th><th style="width:${pane.next ? 34 : 80}%">What its input is made of<br><span>${
    view.by}<span class="live">; click to cut</span></span></th>` + (pane.next ? `<th style="width:${Math.min(30, 10 + 1.5 * across.some.length)}%">Change of ${pane.against === null ? "ln p (target)" : "the difference"
    } when that source is cut<span class="cells" style="${template}">${heads}</span></th>` : "")
    + (pane.lens ? '<th class="wide">Says (logit lens)<br><span>top token, p; bar: target</span></th>' : "")
    + (pane.attends ? '<th class="wide">Attends to</th>' : "") + `</tr></thead><tbody>${groups(pane).map(folded).join("")}</tbody></table>`
    + (pane.next ? `<p class="legend"><span>−${most}</span><b class="ramp" style="background:linear-gradient(90deg,var(--less),var(--tint),var(--more))"></b><span>+${most
    } nats, root scale</span><span><i style="background:var(--less)"></i> falls when it is cut</span><span><i style="background:var(--more)"></i> rises</span>`
    + `<button type="button" data-by="${view.by === "weight" ? "contribution" : "weight"}">show ${view.by === "weight" ? "contributions" : "weights"}</button>`
    + (pane.columns.length > WIDE ? `<button type="button" data-columns="">${across.rest.length ? `all ${pane.columns.length} sources` : "fewer sources"}</button>` : "") + "</p>" : "");
};

const rank = (pane) => {
  const all = leading(pane), most = end(all.map((one) => one.value)), {edges, measured} = pane.scores || {};
  const done = measured ? measured.flat().filter((one) => one !== null).length : 0;
  const bar = (value) => `<div class="middle"><i style="${value < 0 ? "right" : "left"}:50%;width:${
    38 * Math.min(1, Math.abs(value) / most)}px;background:var(--${value < 0 ? "less" : "more"})"></i></div>`;
  const line = (one) => `<tr data-e="${one.r},${one.s}" data-m="${pane.model}" tabindex="0" data-tip="${escape(tipOf(pane, one.r, one.s))}"><td>${escape(shortName(pane, [one.r, one.s]))}</td><td>${
    bar(one.value)}</td><td class="num">${signed(one.value, 2)}</td></tr>`;
  const how = !edges ? "scoring …" : done === 0 ? `${edges} edges, estimated by gradient; measuring …`
    : pane.scores.done === false ? `${done} of ${Math.min(edges, 200)} edges measured …`
      : done < edges ? `The ${done} edges of the largest gradient estimates were measured, of ${edges}.` : `${edges} edges, each cut alone and measured.`;
  const list = () => ranked(pane).map((one) => `<tr><td>${escape(edgeName(pane, [one.r, one.s]))}</td><td class="num">${number(pane.contributions[one.r][one.s])}</td><td class="num">${
    signed(one.value)}</td><td>${one.measured ? "measured" : "estimate"}</td></tr>`).join("");
  return `<h2>Depends most on <small>each source cut alone</small></h2><table class="rank">${all.slice(0, 10).map(line).join("")}</table>`
    + `<p class="note">${how} Cutting two together may do more or less.</p>`
    + (pane === shown.panes[0] ? `<p class="live"><button type="button" data-graph="">Graph of tokens and layers</button> <progress max="1" value="0" hidden></progress></p>` : "")
    + `<details id="all-${pane.model}" ${unfolded.has(`all-${pane.model}`) ? "open" : ""}><summary>all as a table</summary>${unfolded.has(`all-${pane.model}`)
      ? `<div class="scroll"><table class="list"><thead><tr><th>edge</th><th>contribution</th><th>ln p</th><th></th></tr></thead><tbody>${list()}</tbody></table></div>` : ""}</details>`
    + '<p class="note">A layer’s input is a weighted sum of earlier outputs, its <b>sources</b>. A <b>contribution</b> is a source’s part of that sum; a <b>cut</b> takes it out and the others’ weights fill its place. A large contribution need not be needed.</p>';
};

const next = (pane) => {
  if (!pane.next) return "";
  const most = Math.max(...pane.next.flatMap((one) => [one.before, one.after ?? -99]).map(chance));
  const line = (one) => `<tr data-target="${one.id}" tabindex="0" aria-selected="${one.id === pane.target}"><th class="mono" scope="row" data-tip="${escape(one.word)}">${escape(one.word)}${
    one.id === pane.follows ? " ●" : ""}</th><td><span class="bar" style="width:${100 * chance(one.before) / most}%"></span>${one.after === null ? ""
    : `<span class="bar cut" style="width:${100 * chance(one.after) / most}%"></span>`}</td><td class="num">${prob(one.before)}${
    one.after === null ? "" : " → " + prob(one.after)}</td></tr>`;
  const others = pane.next.filter((one) => one.id !== pane.target);
  return `<h2>${shown.panes.length > 1 ? escape(pane.title) + ": p" : "P"}rediction after <span class="mono">“${escape(pane.names[pane.token])}”</span> <small class="live">click to explain</small></h2>`
    + `<table class="next"><tbody>${pane.next.map(line).join("")}</tbody></table>`
    + `<p class="legend">${pane.next[0].after === null ? "" : '<span><i style="background:var(--muted)"></i> as it is</span><span><i style="background:var(--acc)"></i> with your cuts</span>'
    }<span>● the text’s next token</span></p>`
    + (pane === shown.panes[0] ? `<label class="note live">rather than <select data-against=""><option value="">any other token</option>${others.map((one) =>
      `<option value="${one.id}" ${one.id === pane.against ? "selected" : ""}>${escape(one.word)}</option>`).join("")}</select></label>` : "");
};

const heat = (rows, columns, values, {most, tip, edge = () => "", colour = tint}) => `<div class="scroll" tabindex="0"><table class="heat"><thead><tr><th></th>${
  columns.map((one) => `<th scope="col"><span>${escape(one)}</span></th>`).join("")}</tr></thead><tbody>${rows.map((name, r) => `<tr><th scope="row">${escape(name)}</th>${
  columns.map((_, c) => values[r][c] === null || values[r][c] === undefined ? '<td class="none"></td>'
    : `<td style="background:${colour(values[r][c], most)}" data-tip="${escape(tip(r, c))}" ${edge(r, c)}>${number(values[r][c], 2)}</td>`).join("")}</tr>`).join("")}</tbody></table></div>`;
const content = (value, most) => `color-mix(in srgb, ${value < 0 ? "#8c564b" : "#6b4c9a"} ${Math.round(100 * Math.min(1, Math.abs(value) / most))}%, var(--tint))`;
const numbersButton = () => `<button type="button" data-numbers="" aria-pressed="${numbers}">numbers in the cells</button>`;

// By single outputs, which models of every mechanism share: the second less the first.
const difference = () => {
  const [a, b] = shown.panes.map((pane) => pane.outputs && {...pane.outputs, values: pane.outputs[compared]});
  if (!a || !b) return null;
  const rows = a.reads.filter((name) => b.reads.includes(name)), columns = a.columns.filter((name) => b.columns.includes(name));
  const of = (one) => rows.map((row) => columns.map((column) => {
    const [r, c] = [one.reads.indexOf(row), one.columns.indexOf(column)];
    return c > r ? null : one.values[r][c];
  }));
  const [left, right] = [of(a), of(b)];
  return {rows, columns, left, right, change: left.map((row, r) => row.map((one, c) => one === null || right[r][c] === null ? null : right[r][c] - one))};
};
const compare = () => {
  const both = difference();
  if (!both) return '<p class="note">One of these models makes inputs that are no sums of single outputs: there is no difference to show.</p>';
  const effects = compared === "effects", {rows, columns, left, right, change} = both;
  const most = end([...left, ...right].flat(), effects ? 0.02 : 1), apart = end(change.flat());
  const grid = (title, values, options) => `<div><h2>${title}</h2>${heat(rows, columns, values, {...options,
    tip: (r, c) => `${rows[r]} ← ${columns[c]}: ${number(left[r][c])} in A, ${number(right[r][c])} in B, ${signed(change[r][c])}`})}</div>`;
  const [a, b] = shown.panes.map((pane) => escape(pane.title));
  const colour = effects ? tint : content;
  return `<div class="sheet"><h2>${effects ? "Change of ln p when what an output adds to a layer’s input is taken out, estimated by gradient"
    : "Average contribution of every sublayer’s output to every layer’s input"} <small>blocks taken apart, so that all mechanisms share columns</small> <button type="button" data-compared="">show ${
    effects ? "contributions" : "effects"}</button> ${numbersButton()}</h2><div class="columns">`
    + grid(`A: ${a}`, left, {most, colour}) + grid(`B: ${b}`, right, {most, colour})
    + grid(`B minus A <small>orange: less in B, blue: more; to ±${apart}</small>`, change, {most: apart}) + "</div></div>";
};

// One layer's input over the text, and an attention's heads at the chosen token.
const overTokens = (pane) => {
  if (!pane.over) return "";
  const {read, values, heads} = pane.over, one = pane.reads[read], names = pane.names.map((name, t) => `${t} ${name}`);
  const words = one.sources.map((c) => pane.columns[c].label), sources = `<h2>${escape(one.label)} at every token <small>${view.by} of each source</small> ${numbersButton()} <button type="button" data-csv="over">CSV</button></h2>`
    + heat(words, names, values, {most: end(values.flat(), 1), colour: content, tip: (r, c) => `${words[r]} at token ${c} “${pane.names[c]}”: ${number(values[r][c])}`});
  const some = heads ? heads[0].map((_, t) => names[t]) : [];
  return `<div class="sheet">${sources}${heads ? `<h2>What each head of ${escape(one.label)} attends to at “${escape(pane.names[pane.token])}”</h2>`
    + heat(heads.map((_, h) => `head ${h}`), some, heads, {most: 1, colour: content, tip: (r, c) => `head ${r} to token ${c} “${pane.names[c]}”: ${number(heads[r][c])}`}) : ""}</div>`;
};

// The graph: what leads to the output along links of at least the threshold.
const pruned = ({links, places, position}, threshold) => {
  const into = new Map(), key = (t, p) => `${t},${p}`, root = key(position, places.length - 1), reached = new Set([root]), open = [root];
  const some = links.filter((one) => Math.abs(one[4]) >= threshold);
  for (const one of some) into.set(key(one[2], one[3]), [...(into.get(key(one[2], one[3])) || []), one]);
  while (open.length) for (const [t, p] of into.get(open.pop()) || []) if (!reached.has(key(t, p))) { reached.add(key(t, p)); open.push(key(t, p)); }
  return {nodes: [...reached].map((one) => one.split(",").map(Number)), links: some.filter((one) => reached.has(key(one[2], one[3])))};
};
const BEGIN = 40, ROW = 20, LEFT = 96;
const graph = (pane) => `<div class="sheet" id="graph"><h2>How the prediction is made <small>inputs of layers at tokens; lines: what an earlier output adds, or what an attention takes from a token</small></h2>`
  + `<label class="note">fewer or more links <input type="range" id="threshold" min="0" max="1" step="any"></label><div id="drawn">${drawing(pane)}</div></div>`;
// What the slider changes, drawn anew while the slider itself stays where it is.
const drawing = (pane) => {
  const {result} = graphed, most = Math.max(...result.links.map((one) => Math.abs(one[4])), 1e-9);
  if (graphed.at === undefined) graphed.at = Math.sqrt(Math.abs((result.links[BEGIN] || result.links.at(-1) || [0, 0, 0, 0, 0])[4]) / most);
  const threshold = most * graphed.at ** 2, {nodes, links} = pruned(result, threshold);
  const tokens = [...new Set(nodes.map(([t]) => t))].sort((a, b) => a - b), levels = [...new Set(nodes.map(([, p]) => p))].sort((a, b) => b - a);
  const wide = Math.max(74, Math.min(260, 860 / tokens.length));
  const x = (t) => LEFT + wide * (tokens.indexOf(t) + 0.5), y = (p) => ROW * (levels.indexOf(p) + 1), foot = ROW * (levels.length + 1);
  const name = ([t, p]) => `${result.places[p]} at token ${t} “${pane.names[t]}”`;
  const line = ([t, p, u, q, value, measured]) => {
    const bend = t === u ? wide * (0.1 + 0.55 * (levels.indexOf(p) - levels.indexOf(q)) / levels.length) : 0;
    const path = t === u ? `M${x(t)} ${y(p)}C${x(t) + bend} ${y(p)} ${x(u) + bend} ${y(q)} ${x(u)} ${y(q)}` : `M${x(t)} ${y(p)}Q${(x(t) + x(u)) / 2} ${y(p) + 9} ${x(u)} ${y(q)}`;
    return `<path d="${path}" fill="none" stroke="var(--${value < 0 ? "less" : "more"})" stroke-width="${(0.6 + 4 * Math.sqrt(Math.abs(value) / most)).toFixed(2)}" stroke-opacity=".75" data-tip="${
      escape(`${name([t, p])} → ${name([u, q])}: ln p ${signed(value)} without it (${measured ? "measured" : "estimate"})`)}"/>`;
  };
  const dot = ([t, p]) => `<circle cx="${x(t)}" cy="${y(p)}" r="5" data-t="${t}" fill="var(--${p === result.places.length - 1 ? "acc" : "ink"})" data-tip="${escape(name([t, p]))}"/>`;
  const rows = links.slice(0, 200).map((one) => `<tr><td>${escape(name(one))}</td><td>${escape(name(one.slice(2)))}</td><td class="num">${signed(one[4])}</td><td>${one[5] ? "measured" : "estimate"}</td></tr>`).join("");
  return `<p class="note">Links of at least <b>${number(threshold, 4)} nats</b>: ${links.length} links, ${nodes.length} nodes that lead to the output. Orange: ln p falls without it, blue: rises; the largest of depth are measured, others estimated by gradient.${
      result.attends ? "" : " This model shows no weights of its attention: links between tokens are missing."} <button type="button" class="live" data-neuronpedia="${threshold}">Save for Neuronpedia</button> <button type="button" data-csv="graph">CSV</button></p>`
    + `<div class="scroll"><svg class="graph" width="${LEFT + wide * tokens.length}" height="${foot + 16}" role="img" aria-label="${links.length} links, as in the table below">`
    + levels.map((p) => `<text x="0" y="${y(p) + 4}" fill="var(--muted)">${escape(result.places[p])}</text><line x1="${LEFT}" x2="${LEFT + wide * tokens.length}" y1="${y(p)}" y2="${y(p)}" stroke="var(--grid)"/>`).join("")
    + links.map(line).join("") + nodes.map(dot).join("")
    + tokens.map((t) => `<text class="mono" x="${x(t)}" y="${foot + 6}" text-anchor="middle" fill="var(--ink)">${escape(pane.names[t].slice(0, 9))}</text>`).join("")
    + `</svg></div><details id="all-graph" ${unfolded.has("all-graph") ? "open" : ""}><summary>all as a table</summary>${unfolded.has("all-graph")
      ? `<div class="scroll"><table class="list"><thead><tr><th>from</th><th>to</th><th>ln p</th><th></th></tr></thead><tbody>${rows}</tbody></table></div>` : ""}</details>`;
};
const slide = () => {
  const slider = $("#threshold");
  if (!slider) return;
  slider.value = 1 - graphed.at;
  slider.setAttribute("aria-valuetext", $("#drawn b").textContent);
};

const explain = (pane) => pane.error ? `<p class="error">${escape(pane.error)}</p>`
  : `${sentence(pane)}<div class="cards"><div>${depth(pane)}</div><div>${pane.next ? rank(pane) : ""}</div></div>${overTokens(pane)}${graphed && pane === shown.panes[0] ? graph(pane) : ""}`;

const patchOf = () => JSON.stringify([view.text, view.other, view.models[0], shown.panes[0].token, view.target, view.against, view.edited && view.cuts]);
const patching = (pane) => {
  const goal = candidate(pane, pane.target), rows = pane.reads.map((one) => one.label), columns = pane.columns.map((one) => one.label);
  let result = "";
  if (patched && patched.result) {
    const {restored, clean, corrupted, target, against, tokens, alone} = patched.result;
    const values = pane.reads.map((read, r) => columns.map((_, c) => read.sources.includes(c) ? restored[r][read.sources.indexOf(c)] : null));
    const all = pane.reads.flatMap((read, r) => read.sources.map((_, s) => ({r, s, value: restored[r][s]}))).sort((a, b) => Math.abs(b.value) - Math.abs(a.value));
    const margins = against === null ? `ln p of “${target}”` : `ln p of “${target}” less that of “${against}”`;
    result = `<p class="say">Taking <b>${escape(edgeName(pane, [all[0].r, all[0].s]))}</b> from the other text restores <b>${number(100 * all[0].value, 0)} %</b> of what it predicts.</p>`
      + `<p class="sub">${escape(margins)} is ${number(clean)} after the other text and ${number(corrupted)} after this one; 0 % changes nothing, 100 % restores the other text’s. ${
      alone ? `${alone} of the ${tokens} tokens up to there have no partner in the other text and keep their own vectors.` : "Every token has a partner in the other text."}${
      Math.abs(clean - corrupted) < 0.05 ? " The two numbers hardly differ, so the parts are large." : ""}</p>`
      + `<div class="columns"><div class="fit"><h2>Part restored by each edge’s vector ${numbersButton()}</h2>${heat(rows, columns, values, {most: end(values.flat(), 0.1), tip: (r, c) => `${rows[r]} ← ${columns[c]}: ${number(values[r][c])} restored`})}</div>`
      + `<div><h2>Restore most</h2><table class="list">${all.slice(0, 12).map((one) => `<tr><td>${escape(edgeName(pane, [one.r, one.s]))}</td><td class="num">${signed(one.value, 2)}</td></tr>`).join("")}</table></div></div>`;
  }
  return `<h2>Patch from another text <small>each edge’s vectors are taken from it, one edge at a time</small></h2>`
    + `<textarea class="text" id="other" style="height:110px" aria-label="text that patches come from">${escape(view.other)}</textarea>`
    + `<p class="note">Measured is ${view.target === null ? "the other text’s likeliest token" : `“${escape(goal.word)}”`} after “${escape(pane.names[pane.token])}”, the chosen token, and its partner in the other text${
      pane.against === null ? "" : ` rather than “${escape(candidate(pane, pane.against).word)}”`}. Texts of as many tokens are aligned token by token, others by what both have, from the last token on.${
      view.edited && view.cuts.length ? " Cuts at all tokens are in place in both texts, those at one token are not." : ""} <button type="button" data-patch="">Patch every edge</button> <progress max="1" value="0" hidden></progress></p>${result}`;
};

const inLine = (text) => escape(text).replace(/\s*\n\s*/g, "↵ ");
const searching = (pane) => {
  if (begin.corpus === null) return '<p class="note">No corpus is open: start the app with --corpus (stdlib, a file or folder, hub:NAME) to search for the tokens at which a source is most of a layer’s input.</p>';
  const pick = (name, words, value) => `<select data-pick="${name}" aria-label="${name}">${words.map((one, i) => `<option value="${i}" ${i === value ? "selected" : ""}>${escape(one)}</option>`).join("")}</select>`;
  const read = Math.min(view.read, pane.reads.length - 1), sources = pane.reads[read].sources.map((c) => pane.columns[c].label);
  const hits = found ? `<p class="note">${found.tokens.toLocaleString("en")} tokens of ${found.documents.toLocaleString("en")} documents, mean ${number(found.mean)}${found.cuts ? ", with your cuts at all tokens" : ""}. Click a token to look at its text.</p><table class="list"><tbody>${
    found.hits.map((hit, i) => `<tr><td class="num">${number(hit.value)}</td><td class="mono before">${inLine(hit.before)}</td><td><button type="button" class="mono" data-hit="${i}">${escape(hit.token)}</button></td><td class="mono after">${inLine(hit.after)}</td><td class="note">${escape(hit.document)}</td></tr>`).join("")}</tbody></table>` : "";
  return `<h2>Tokens of ${escape(begin.corpus)} at which a source is most of a layer’s input</h2><p>${pick("source", sources, Math.min(view.source, sources.length - 1))} of ${pick("read", pane.reads.map((one) => one.label), read)}
    <button type="button" data-search="most">Top tokens</button> <button type="button" data-search="least">Bottom tokens</button> <progress max="1" value="0" hidden></progress></p>${hits}`;
};

const training = (pane) => {
  const one = pane.training;
  if (!one) return "";
  const since = one.first === null ? "" : `<th>at step ${one.first}</th><th>query turned (cosine)</th>`;
  const rows = one.sharpness ? one.reads.map((name, r) => `<tr><td>${escape(name)}</td><td class="num">${number(one.sharpness[r])}</td>${one.first === null ? "" : `<td class="num">${number(one.before[r])}</td><td class="num">${number(one.turned[r])}</td>`}</tr>`).join("") : "";
  const similar = one.similar ? `<div><h2>Similarity of the layers’ queries <small>cosine: layers that look for the same thing</small> ${numbersButton()}</h2>${heat(one.similar.reads, one.similar.reads, one.similar.cosine, {most: 1, tip: (r, c) => `${one.similar.reads[r]} and ${one.similar.reads[c]}: ${number(one.similar.cosine[r][c])}`})}</div>` : "";
  const table = rows ? `<div class="fit"><h2>How sharply layers choose <small>largest logit</small></h2><table class="list"><thead><tr><th>layer</th><th>now</th>${since}</tr></thead><tbody>${rows}</tbody></table></div>` : '<p class="note">This residual has no queries: it learns no choice of sources.</p>';
  return `<h2>${escape(pane.title)} <small>${escape(pane.details)}</small></h2><div class="columns">${table}${similar}</div>`;
};

const main = () => {
  const [pane] = shown.panes;
  if (view.tab === "training") return shown.panes.map((one) => one.error ? "" : training(one)).join("");
  if (pane.error) return shown.panes.map(explain).join("");
  if (view.tab === "patch") return patching(pane);
  if (view.tab === "search") return searching(pane);
  return shown.panes.map(explain).join('<hr style="border:0;border-top:2px solid var(--ink)">') + (shown.panes.length > 1 ? compare() : "");
};

const text = (pane) => pane.tokens.map((piece, t) => `<span role="button" tabindex="${t === pane.token ? 0 : -1}" data-t="${t}" aria-pressed="${t === pane.token}" style="--c:${
  pane.columns[pane.largest[t]].colour}" aria-label="${escape(`token ${t} “${pane.names[t]}”`)}" data-tip="${escape(`token ${t} “${pane.names[t]}”: ${pane.reads[pane.marked].label} reads most of ${pane.columns[pane.largest[t]].label}`
  + (t ? `; loss ${number(pane.losses[t - 1], 2)}${pane.losses_cut ? ` → ${number(pane.losses_cut[t - 1], 2)}` : ""}` : ""))}">${escape(piece).replace(/\n/g, "↵\n") || "·"}</span>`).join("");

const tray = (pane) => {
  const chip = (cut, i) => {
    const own = shown.panes.find((one) => one.model === cut.model && !one.error);
    const name = own ? edgeName(own, [cut.read, cut.source]) : "in a model that is not shown";
    return `<span class="chip">${escape(name)}${cut.token === null ? "" : ` at “${escape((pane.names || [])[cut.token] ?? cut.token)}”`}<button type="button" data-undo="${i}" aria-label="restore ${escape(name)}">×</button></span>`;
  };
  const after = pane.loss_cut === null || pane.loss_cut === undefined ? "" : `text loss ${number(pane.loss)} → <b>${number(pane.loss_cut)}</b> nats per token; KL ${number(pane.divergence)}`;
  const choice = (name, pairs) => `<select data-choose="${name}" aria-label="${name}">${pairs.map(([value, words]) => `<option value="${value}" ${String(view[name]) === value ? "selected" : ""}>${words}</option>`).join("")}</select>`;
  return `<b>What if</b> ${view.cuts.length ? view.cuts.map(chip).join(" ") : '<span class="note">No cuts yet: click a bar, a cell or a row.</span>'}<button type="button" data-tab="patch">or patch from another text</button><span class="gap"></span><span class="num">${after}</span>`
    + choice("span", [["all", "cut at all tokens"], ["one", "cut at this token"]]) + choice("edited", [["true", "figures with my cuts"], ["false", "figures as it is"]])
    + `<button type="button" data-undo="last" ${view.cuts.length ? "" : "disabled"}>Undo</button><button type="button" data-undo="all" ${view.cuts.length ? "" : "disabled"}>Restore all</button>`;
};

// What has the focus outlives what is drawn anew: it is known by what it does.
const mark = () => {
  const one = document.activeElement, names = one && one !== document.body
    ? [...one.attributes].filter(({name}) => (name.startsWith("data-") && name !== "data-tip" && name !== "data-open") || name === "id") : [];
  const box = one && one.closest(".depth") ? ".depth " : one && one.closest(".rank") ? ".rank " : "";
  return names.length ? box + (one.matches(".cell") ? ".cell" : "") + names.map(({name, value}) => `[${name}="${CSS.escape(value)}"]`).join("") : null;
};
const options = (select, pairs, value) => {
  const html = pairs.map(([one, words]) => `<option value="${one}">${escape(words)}</option>`).join("");
  if (select.innerHTML !== html) select.innerHTML = html;
  select.value = value;
};

const draw = () => {
  counted.draws++;
  const [pane] = shown.panes, focus = mark(), scroll = $("#text").scrollTop, inside = $(".depth")?.contains(document.activeElement);
  const typed = $("#other") && document.activeElement === $("#other") ? [$("#other").value, $("#other").selectionStart] : null;
  document.body.classList.toggle("numbers", numbers);
  if (!saved) {
    const here = begin.choices[view.models[0]], readable = begin.choices.map((one, i) => [i, one]).filter(([, one]) => one.reads);
    const last = readable.filter(([i, one]) => !readable.some(([j, other]) => other.run === one.run && j > i));
    const steps = readable.filter(([, one]) => one.run === here.run);
    options($("#model"), last.map(([i, one]) => [i, steps.length > 1 ? one.label.replace(/, step [0-9,]+/, "") : one.label]), last.find(([, one]) => one.run === here.run)[0]);
    options($("#beside"), [["", "nothing"], ...readable.filter(([i]) => i !== view.models[0]).map(([i, one]) => [i, one.label])], view.models.length > 1 ? view.models[1] : "");
    $("#beside").parentElement.hidden = readable.length < 2;
    $("#steps").hidden = steps.length < 2;
    $("#steps input").max = steps.length - 1;
    $("#steps input").value = steps.findIndex(([i]) => i === view.models[0]);
    $("#steps output").textContent = here.step ?? "";
    for (const tab of document.querySelectorAll("[role=tab]")) tab.setAttribute("aria-selected", tab.dataset.tab === view.tab);
    $("#tray").innerHTML = tray(pane);
  }
  $("#side").hidden = !pane.error && !pane.tokens.length;
  $("#main").style.gridTemplateColumns = $("#side").hidden ? "minmax(0,1fr)" : "";
  $("#text").innerHTML = pane.error ? escape(view.text) : text(pane);
  $("#text").scrollTop = scroll;
  const chosen = $("#text [aria-pressed=true]");
  if (chosen && looked !== pane.token) $("#text").scrollTop = chosen.offsetTop - $("#text").clientHeight / 2;
  looked = pane.token;
  $("#marks").innerHTML = pane.error ? "" : `underlined by the largest source of ${escape(pane.reads[pane.marked].label)}: ` + [...new Set(pane.largest)].sort((a, b) => a - b)
    .slice(0, 12).map((c) => `<span><i style="background:${pane.columns[c].colour}"></i> ${escape(pane.columns[c].label)}</span>`).join("");
  $("#next").innerHTML = shown.panes.filter((one) => !one.error).map(next).join("");
  $("#answer").innerHTML = main();
  slide();
  const stop = document.querySelector(".depth .cell, .depth .stack button");
  if (stop) stop.tabIndex = 0;
  $("#live").textContent = [...document.querySelectorAll(".say")].map((one) => one.textContent).join(" ");
  if (typed) {
    $("#other").value = typed[0];
    $("#other").focus();
    $("#other").selectionStart = typed[1];
  } else if (focus && !$(focus)?.matches("textarea,select,input:not([type=range])")) {
    const one = $(focus);
    if (one) {
      if (inside) one.tabIndex = 0;
      one.focus({preventScroll: true});
    }
  }
};

// ---------------------------------------------------------------- files

const download = (words, name, type) => {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([words], {type}));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
};

// What the part of the page shows, as rows.
const sheet = (part = view.tab) => {
  const [pane] = shown.panes, {over} = pane, node = (t, p) => [t, pane.names[t], graphed.result.places[p]];
  if (part === "graph") return [["from token", "word", "from", "to token", "word", "to", "ln p without it", "how"], ...graphed.result.links.map(([t, p, u, q, value, measured]) =>
    [...node(t, p), ...node(u, q), value, measured ? "measured" : "estimate"])];
  if (part === "over") return [["layer", "source", "token", "word", view.by], ...over.values.flatMap((row, s) => row.map((one, t) =>
    [pane.reads[over.read].label, pane.columns[pane.reads[over.read].sources[s]].label, t, pane.names[t], one])),
  ...(over.heads || []).flatMap((row, h) => row.map((one, t) => [pane.reads[over.read].label, `head ${h} attends to`, t, pane.names[t], one]))];
  if (view.tab === "search" && found) return [["value", "before", "token", "after"], ...found.hits.map((one) => [one.value, one.before, one.token, one.after])];
  if (view.tab === "training" && pane.training) return [["layer", "sharpness", "before", "turned"], ...pane.training.reads.map((name, r) =>
    [name, ...["sharpness", "before", "turned"].map((key) => (pane.training[key] || [])[r])])];
  if (view.tab === "patch" && patched && patched.result) return [["layer", "source", "restored", "patched"], ...pane.reads.flatMap((read, r) => read.sources.map((c, s) =>
    [read.label, pane.columns[c].label, patched.result.restored[r][s], patched.result.patched[r][s]]))];
  const both = shown.panes.length > 1 && difference();
  if (both) return [["layer", "source", "A", "B", "B minus A"], ...both.rows.flatMap((row, r) => both.columns.map((column, c) =>
    [row, column, both.left[r][c], both.right[r][c], both.change[r][c]]).filter(([, , a]) => a !== null))];
  return [["layer", "source", "contribution", "weight", "gradient", "measured"], ...pane.reads.flatMap((read, r) => read.sources.map((c, s) =>
    [read.label, pane.columns[c].label, pane.contributions[r][s], pane.weights[r][s], pane.scores?.gradient?.[r][s], pane.scores?.measured?.[r][s]]))];
};
const csv = (rows) => rows.map((row) => row.map((one) => /[",\n]/.test(one ?? "") ? `"${String(one).replace(/"/g, '""')}"` : one ?? "").join(",")).join("\n") + "\n";

// The tables of the page as a picture: every coloured cell and bar stands where it is on the screen.
const picture = () => {
  const area = $("#answer"), box = area.getBoundingClientRect(), parts = [];
  const style = getComputedStyle(document.documentElement), paper = style.getPropertyValue("--paper");
  for (const one of area.querySelectorAll("th,td,button,.stack > span,.cells > span,.goal,.middle i,.say,.sub,.note,h2")) {
    const at = one.getBoundingClientRect(), look = getComputedStyle(one), [x, y] = [at.x - box.x, at.y - box.y];
    if (!at.width || !at.height) continue;
    if (look.backgroundColor !== "rgba(0, 0, 0, 0)") parts.push(`<rect x="${x.toFixed(1)}" y="${y.toFixed(1)}" width="${at.width.toFixed(1)}" height="${at.height.toFixed(1)}" fill="${look.backgroundColor}"/>`);
    const words = one.matches(".say,.sub,.note,h2,th,td,.stack *") && !one.querySelector("button,.cells") ? one.textContent.trim() : "";
    if (words && look.fontSize !== "0px" && !one.closest("td .note, h2 small")) parts.push(`<text x="${(x + 2).toFixed(1)}" y="${(y + parseFloat(look.fontSize)).toFixed(1)}" font-size="${
      look.fontSize}" font-family="${one.matches(".mono,.mono *") ? "monospace" : "sans-serif"}" fill="${look.color}">${escape(words)}</text>`);
  }
  for (const one of area.querySelectorAll("svg")) {
    const at = one.getBoundingClientRect(), drawn = one.innerHTML.replace(/var\((--[a-z]+)\)/g, (_, name) => style.getPropertyValue(name).trim());
    parts.push(`<g transform="translate(${(at.x - box.x).toFixed(1)} ${(at.y - box.y).toFixed(1)})" font-size="11" font-family="sans-serif">${drawn}</g>`);
  }
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${box.width.toFixed(0)} ${box.height.toFixed(0)}" width="${box.width.toFixed(0)}"><rect width="100%" height="100%" fill="${paper}"/>${parts.join("")}</svg>`;
};

// The Python that makes what the part of the page shows.
const code = () => {
  const [pane] = shown.panes, string = JSON.stringify, edge = (r, s) => [pane.columns[pane.reads[r].sources[s]].name, pane.reads[r].name].map((one) => string(one));
  const cuts = view.cuts.filter((cut) => cut.model === pane.model).map((cut) => {
    const [source, read] = edge(cut.read, cut.source);
    return `Ablate(${source}, reads=${read}${cut.token === null ? "" : `, tokens=${cut.token}`})`;
  });
  const of = `position=${pane.token}, target=${pane.target}${pane.against === null ? "" : `, against=${pane.against}`}`, goal = candidate(pane, pane.target);
  const lines = ["import attnres", "from attnres.inspect import Ablate, TextModel, attribute, circuit, intervene, logit_lens, patch, predict, search", "",
    `model = ${begin.choices ? begin.choices[view.models[0]].code : "..."}`, `text = ${string(view.text)}`, `cuts = [${view.edited ? cuts.join(", ") : ""}]`];
  if (goal) lines.push(`# the target is ${string(goal.word)}`);
  if (view.tab === "patch") lines.push(`other = ${string(view.other)}`, `patch(model, other, text, ${view.target === null ? of.replace(/ target=[0-9]+,?/, "").replace(/,$/, "") : of}, edits=cuts).top(10)`);
  else if (view.tab === "search") {
    const [source, read] = edge(view.read, view.source);
    lines.push("documents = [text]  # yours", "with intervene(model, *cuts):", `    search(model, tokenizer, documents, ${source}, ${read}, context=256)  # the model's tokenizer`);
  } else if (view.tab === "training") lines.push("attnres.inspect.from_trace(model).sharpness");
  else lines.push("with intervene(model, *cuts), attnres.record(model, tokens=True) as trace:", "    predict(model, text)", "trace.token_contributions  # of each layer's input, (1, tokens, sources)",
    "with intervene(model, *cuts):", `    lens = logit_lens(model, text, position=${pane.token}, target=${pane.target})`, `scores = attribute(model, text, ${of}, edits=cuts, most=200)`, "scores.top(10)",
    ...(graphed ? [`graph = circuit(model, text, ${of}, edits=cuts)`, "graph.neuronpedia(0.01)"] : []));
  return lines.join("\n") + "\n";
};

// ---------------------------------------------------------------- clicks and keys

const toggle = (target) => {
  const [read, source] = target.dataset.e.split(",").map(Number), model = +target.dataset.m;
  const token = view.span === "one" ? shown.panes[0].token : null;
  const same = (cut) => cut.model === model && cut.read === read && cut.source === source && cut.token === token;
  change({cuts: view.cuts.some(same) ? view.cuts.filter((cut) => !same(cut)) : [...view.cuts, {model, read, source, token}]});
};

const work = async (path, button, body, take) => {
  const bar = button.parentElement.querySelector("progress");
  bar.hidden = false;
  $("#said").textContent = "";
  document.body.setAttribute("data-working", path);
  try { take(await lines(path, body, ({part}) => { bar.value = part; })); } catch (error) { complain(error); }
  document.body.removeAttribute("data-working");
  bar.hidden = true;
  draw();
};

const exported = async (threshold) => {
  try { download(await (await post("neuronpedia", {view, threshold})).text(), "attnres-graph.json", "application/json"); } catch (error) { complain(error); }
};

const press = (target) => {
  const {t, fold, hit, by, undo, target: goal, search, patch, tab, columns, numbers: cells, layer} = target.dataset;
  if (target.dataset.compared !== undefined) { compared = compared === "values" ? "effects" : "values"; return draw(); }
  if (target.dataset.csv !== undefined) return download(csv(sheet(target.dataset.csv)), `attnres-${target.dataset.csv}.csv`, "text/csv");
  if (cells !== undefined) { numbers = !numbers; return draw(); }
  if (columns !== undefined) { unfolded[unfolded.has("columns") ? "delete" : "add"]("columns"); return draw(); }
  if (fold !== undefined) {
    const open = target.dataset.open === "true", shut = fold.replace(":", ":shut:");
    unfolded[open ? "delete" : "add"](fold);
    unfolded[open ? "add" : "delete"](shut);
    return draw();
  }
  if (saved) {
    const every = shown.panes[0].every, pane = shown.panes[0];
    if (layer !== undefined && every) {
      view.layer = view.layer === +layer ? null : +layer;
      const rows = every[view.by === "weight" ? "weights" : "contributions"][+layer];
      pane.over = view.layer === null ? null : {read: +layer, values: rows[0].map((_, s) => rows.map((row) => row[s])), heads: null};
      return draw();
    }
    if (t === undefined || !every) return;
    Object.assign(shown.panes[0], {token: +t, contributions: every.contributions.map((row) => row[t]), weights: every.weights.map((row) => row[t])});
    return draw();
  }
  if (layer !== undefined) return change({layer: view.layer === +layer ? null : +layer});
  if (target.dataset.graph !== undefined) {
    const of = scoreOf(shown.panes[0]);
    return work("circuit", target, {view}, (result) => { graphed = {result, of}; });
  }
  if (target.dataset.neuronpedia !== undefined) return exported(+target.dataset.neuronpedia);
  if (t !== undefined) return change({token: +t, target: null, against: null});
  if (target.dataset.e !== undefined) return toggle(target);
  if (goal !== undefined) return change({target: +goal === shown.panes[0].follows ? null : +goal, against: +goal === view.against ? null : view.against});
  if (by !== undefined) return change({by});
  if (tab !== undefined) {
    const [most] = tab === "search" && !view.read && !view.source ? leading(shown.panes[0]) : [];
    return change(most ? {tab, read: most.r, source: most.s} : {tab});
  }
  if (undo !== undefined) return change({cuts: undo === "all" ? [] : view.cuts.filter((_, i) => i !== (undo === "last" ? view.cuts.length - 1 : +undo))});
  if (hit !== undefined) return change({text: found.hits[hit].text, token: found.hits[hit].at, target: null, against: null, tab: "explain"});
  if (target.dataset.example !== undefined) return change({text: begin.examples[target.dataset.example], token: null, target: null, against: null});
  if (search !== undefined) return work("search", target, {view, least: search === "least"}, (result) => { found = result; });
  if (patch !== undefined) {
    view = {...view, other: whole($("#other").value)};
    const of = patchOf();
    return work("patch", target, {view}, (result) => { patched = {result, of}; });
  }
};

const CLICKED = "[data-t],[data-e],[data-fold],[data-hit],[data-by],[data-undo],[data-target],[data-search],[data-patch],[data-tab],[data-columns],[data-numbers],[data-example],[data-layer],[data-graph],[data-neuronpedia],[data-compared],[data-csv]";
document.addEventListener("click", (event) => {
  const target = event.target.closest(CLICKED);
  if (target && shown && !target.disabled) { tip(""); press(target); }
});
document.addEventListener("change", (event) => {
  const {choose, against, pick} = event.target.dataset, {value} = event.target;
  if (choose) change({[choose]: choose === "edited" ? value === "true" : value});
  if (against !== undefined) change({against: value === "" ? null : +value});
  if (pick) { found = null; change(pick === "read" ? {read: +value, source: 0} : {source: +value}); }
});
document.addEventListener("input", (event) => {
  if (event.target.id !== "threshold") return;
  graphed.at = 1 - event.target.value;
  $("#drawn").innerHTML = drawing(shown.panes[0]);
  slide();
});
document.addEventListener("toggle", (event) => {
  const {id, open} = event.target;
  if (!id.startsWith("all-") || unfolded.has(id) === open) return;
  unfolded[open ? "add" : "delete"](id);
  draw();
}, true);

// Arrow keys move among tokens or edges: left and right in their order, up and down to the nearest of a line.
const MOVED = ".text [data-t],.depth .cell,.depth .stack [data-e]";
document.addEventListener("keydown", (event) => {
  const one = event.target;
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  if (one.matches("tr[tabindex]") && (event.key === "Enter" || event.key === " ")) { event.preventDefault(); return press(one); }
  if (one.id === "editor" && event.key === "Escape") return edit(false);
  if (!one.matches(MOVED)) return;
  const kind = one.matches("[data-t]") ? "[data-t]" : one.matches(".cell") ? ".cell" : ".stack [data-e]";
  const all = [...one.closest(".text,table").querySelectorAll(kind)], step = {ArrowLeft: -1, ArrowRight: 1}[event.key], down = {ArrowUp: -1, ArrowDown: 1}[event.key];
  let to = step ? all[all.indexOf(one) + step] : {Home: all[0], End: all.at(-1)}[event.key];
  if (down) {
    const place = (item) => { const box = item.getClientRects()[0] || {x: 0, y: 0, width: 0}; return [box.x + box.width / 2, box.y]; };
    const [x, y] = place(one), near = (item) => { const [ix, iy] = place(item); return down * (iy - y) > 4 ? down * (iy - y) * 1000 + Math.abs(ix - x) : Infinity; };
    to = all.reduce((best, item) => near(item) < near(best) ? item : best, one);
  }
  if (event.key === "Enter" || event.key === " ") press(one);
  else if (to) { to.tabIndex = 0; to.focus(); }
  else if (!step && !down) return;
  event.preventDefault();
});

const tip = (words, x = 0, y = 0) => {
  const box = $("#tip");
  box.textContent = words || "";
  box.style.display = words ? "block" : "none";
  const size = box.getBoundingClientRect();
  box.style.left = Math.max(4, Math.min(x + 12, innerWidth - size.width - 4)) + "px";
  box.style.top = (y + 18 + size.height > innerHeight ? y - size.height - 10 : y + 18) + "px";
};
const point = (event) => {
  const target = event.target.closest && event.target.closest("[data-tip]"), box = target && event.type === "focusin" ? target.getBoundingClientRect() : null;
  tip(target && target.dataset.tip, box ? box.left : event.clientX, box ? box.bottom - 14 : event.clientY);
};
document.addEventListener("mousemove", point);
document.addEventListener("focusin", (event) => { if (event.target.matches(":focus-visible")) point(event); });
document.addEventListener("focusout", () => tip(""));
document.addEventListener("scroll", () => tip(""), {passive: true, capture: true});

// ---------------------------------------------------------------- controls

const edit = (open) => {
  $("#editor").hidden = !open;
  $("#text").hidden = open;
  $("#edit").setAttribute("aria-pressed", open);
  if (open) { $("#editor").value = view.text; $("#editor").focus(); } else $("#edit").focus();
};
const setTheme = (dark) => {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  $("#theme").setAttribute("aria-pressed", dark);
};
$("#theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme !== "dark"));
setTheme(matchMedia("(prefers-color-scheme: dark)").matches);
$("#csv").addEventListener("click", () => download(csv(sheet()), `attnres-${view.tab}.csv`, "text/csv"));
$("#svg").addEventListener("click", () => download(picture(), `attnres-${view.tab}.svg`, "image/svg+xml"));
$("#code").addEventListener("click", () => { $("#codes pre").textContent = code(); $("#codes").showModal(); });
$("#codes button").addEventListener("click", () => $("#codes").close());

if (saved) {
  document.body.classList.add("saved");
  document.body.classList.toggle("fixed", !saved.panes[0].every);
  shown = saved;
  view = saved.view;
  found = saved.found ?? null;
  patched = saved.patched ?? null;
  graphed = saved.graphed ?? null;
  $("#code").hidden = !shown.panes[0].next;
  draw();
} else {
  $("#edit").addEventListener("click", () => edit($("#editor").hidden));
  $("#text").addEventListener("dblclick", () => edit(true));
  $("#editor").maxLength = begin.characters;
  $("#editor").addEventListener("input", (event) => change({text: whole(event.target.value), token: null, target: null, against: null}, false));
  $("#examples").innerHTML = Object.keys(begin.examples).map((name) => `<button type="button" data-example="${name}">${name}</button>`).join(" ");
  // Of two steps of one training the earlier stands left, whichever was chosen first.
  const models = (first, second) => {
    const pair = second === "" || +second === +first ? [+first] : [+first, +second], [a, b] = pair.map((i) => begin.choices[i]);
    const turned = b && a.run === b.run && (a.step ?? 0) > (b.step ?? 0);
    change({models: turned ? pair.reverse() : pair, target: null, against: null});
  };
  $("#model").addEventListener("change", (event) => models(event.target.value, $("#beside").value));
  // Without a second model the page shows the one that it showed alone, whichever of the two stands left.
  let own = null;
  $("#beside").addEventListener("change", ({target: {value}}) => {
    if (view.models.length === 1) [own] = view.models;
    models(value === "" && view.models.includes(own) ? own : view.models[0], value);
  });
  $("#steps input").addEventListener("change", (event) => {
    const steps = [...begin.choices.keys()].filter((i) => begin.choices[i].reads && begin.choices[i].run === begin.choices[view.models[0]].run);
    models(steps[+event.target.value], view.models.length > 1 ? view.models[1] : "");
  });
  $("#copy").addEventListener("click", async () => {
    const box = $("#copy").getBoundingClientRect();
    try { await navigator.clipboard.writeText(location.href); tip("copied", box.left, box.bottom - 14); } catch { tip(location.href, box.left, box.bottom - 14); }
  });
  $("#save").addEventListener("click", async () => {
    const page = await (await fetch("alone")).text(), data = JSON.stringify({...shown, view, found, patched, graphed}).replace(/</g, "\\u003c");
    download(page.replace('"{{saved}}"', () => data), "attnres-explorer.html", "text/html");
  });
  addEventListener("popstate", (event) => {
    const step = event.state;
    if (!step || JSON.stringify(step.models) !== JSON.stringify(begin.models)) return location.reload();
    view = step.view;
    ask();
  });
  const past = history.state;
  if (past && JSON.stringify(past.models) === JSON.stringify(begin.models)) view = past.view;
  ask(location.search);
}
