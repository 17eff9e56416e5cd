"""The page's style, and the few lines of JavaScript that Gradio has no component for.

Gradio puts its own class before every selector of `CSS` and drops what it does not know; such rules stand in `HEAD`.
"""

HEAD = """
<meta name="color-scheme" content="light">
<style>
/* What a knock-out does stays in sight while the figures below are clicked; its height must not change by it. */
.pane .next { background: #fdfdfc; }
.pane .next .note { white-space: nowrap; overflow: hidden; text-overflow: ellipsis; min-height: 1.3em; }
@media (min-height: 640px) {
  html { scroll-padding-top: 270px; }
  .pane .next { position: sticky; top: 0; z-index: 1; padding-bottom: 0.5rem; border-bottom: 1px solid #e2e6eb; }
  .pane .next h3 { padding-top: 0.4rem; }
}
.pane { container-type: inline-size; }
.pane .body > div { display: contents; }
@container (min-width: 830px) {
  .pane .body { display: grid; grid-template-columns: 1fr 1fr; column-gap: 2rem; }
  .pane .body > div { display: block; min-width: 0; }
}
/* What takes half a second or more says so, wherever the page is scrolled to. */
#said .progress-text { position: fixed !important; inset: 8px 12px auto auto !important; z-index: 1000;
  background: #1b1f24 !important; color: #fdfdfc !important; padding: 2px 8px !important; border-radius: 4px;
  animation: attnres-late 0.5s; }
@keyframes attnres-late { 0%, 99% { visibility: hidden; } }
</style>
<script>
window.attnresTip = function (words, x, y) {
  let tip = document.getElementById("attnres-tip");
  if (!tip) {
    tip = document.createElement("div");
    tip.id = "attnres-tip";
    document.body.append(tip);
  }
  tip.textContent = words || "";
  tip.style.display = words ? "block" : "none";
  if (!words) return;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(x + 12, innerWidth - box.width - 4)) + "px";
  tip.style.top = (y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18) + "px";
};
window.attnresSave = function (blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
};
window.attnresFigure = function (svg, kind) {
  const box = svg.viewBox.baseVal, copy = svg.cloneNode(true), scale = 3;
  const height = box.height + 20;  // a line for the title
  copy.setAttribute("viewBox", "0 -20 " + box.width + " " + height);
  copy.setAttribute("width", box.width * 2);
  copy.setAttribute("height", height * 2);
  const paper = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  paper.setAttribute("y", "-20");
  paper.setAttribute("width", "100%");
  paper.setAttribute("height", "100%");
  paper.setAttribute("fill", "#ffffff");
  copy.prepend(paper);
  const title = document.createElementNS("http://www.w3.org/2000/svg", "text");
  title.setAttribute("x", "4");
  title.setAttribute("y", "-7");
  title.textContent = svg.getAttribute("aria-label");
  copy.append(title);
  const data = new Blob([new XMLSerializer().serializeToString(copy)], {type: "image/svg+xml"});
  const name = "attnres-" + svg.dataset.figure;
  if (kind === "svg") return attnresSave(data, name + ".svg");
  const image = new Image();
  image.onload = () => {
    const canvas = document.createElement("canvas");
    canvas.width = box.width * scale;
    canvas.height = height * scale;
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    canvas.toBlob((blob) => attnresSave(blob, name + ".png"), "image/png");
    URL.revokeObjectURL(image.src);
  };
  image.src = URL.createObjectURL(data);
};
window.attnresCopy = function () {
  const box = document.getElementById("copy").getBoundingClientRect();
  attnresTip("copied", box.left, box.top);
  setTimeout(() => attnresTip(""), 1500);
  const area = document.createElement("textarea");
  const old = () => { area.value = location.href; document.body.append(area); area.select();
                      document.execCommand("copy"); area.remove(); };
  if (navigator.clipboard) navigator.clipboard.writeText(location.href).catch(old); else old();
};
</script>
"""

ON_LOAD = "() => { document.body.classList.remove('dark'); return [location.search]; }"
SET_LINK = "(query) => { history.replaceState(null, '', query || location.pathname); }"
DOWNLOAD = """(data) => {
  if (data) attnresSave(new Blob([data], {type: "application/json"}), "attnres-view.json");
}"""

ON_PANE = """
const edge = (target) => ({
  model: +target.closest("[data-model]").dataset.model, read: +target.dataset.read, source: +target.dataset.source,
});
const press = (event) => {
  const target = event.target.closest("[data-token],[data-read],[data-save]");
  if (!target) return;
  if (target.dataset.save) {
    attnresFigure(target.closest("section").querySelector("svg"), target.dataset.save);
  } else if (target.dataset.token !== undefined) {
    trigger("click", {token: +target.dataset.token});
  } else {
    attnresTip("");
    trigger("click", edge(target));
  }
};
// Arrow keys move among tokens, bars or cells: left and right in their order, up and down to the nearest of a line.
const neighbour = (target, key) => {
  const all = [...target.closest(".text,svg").querySelectorAll("[data-token],[data-read]")];
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
    if (lines > 4 && far < least) [nearest, least] = [one, far];
  }
  return nearest;
};
element.addEventListener("click", press);
element.addEventListener("keydown", (event) => {
  if (!event.target.matches("[data-token],[data-read]") || event.ctrlKey || event.altKey || event.metaKey) return;
  const next = neighbour(event.target, event.key);
  if (next) next.focus();
  else if (event.key === "Enter" || event.key === " ") press(event);
  else if (!event.key.startsWith("Arrow")) return;
  event.preventDefault();
});
const point = (event) => {
  const target = event.target.closest("[data-tip],.edge");
  const box = target && event.type === "focusin" ? target.getBoundingClientRect() : null;
  const words = target && (target.dataset.tip || target.getAttribute("aria-label"));
  attnresTip(words, box ? box.left : event.clientX, box ? box.bottom - 14 : event.clientY);
};
element.addEventListener("mousemove", point);
element.addEventListener("focusin", (event) => { if (event.target.matches(":focus-visible")) point(event); });
element.addEventListener("mouseleave", () => attnresTip(""));
element.addEventListener("focusout", () => attnresTip(""));
watch("value", () => {
  const box = element.querySelector(".text"), token = box && box.querySelector("[aria-pressed]");
  if (!token) return;
  const hidden = token.offsetTop < box.scrollTop || token.offsetTop > box.scrollTop + box.clientHeight - 20;
  if (hidden) box.scrollTop = token.offsetTop - box.clientHeight / 2;
});
"""

CSS = """
body, gradio-app { background: #fdfdfc !important; color-scheme: light; }
.gradio-container { overflow: visible !important; }
.gradio-container { width: 100% !important; max-width: 1500px !important; margin: 0 auto !important; color: #1b1f24; }
.gradio-container .main { padding: 12px clamp(6px, 2vw, 28px) !important; }
.gradio-container .main > .wrap > .contain > .column { gap: 12px; }
#intro h1 { font-size: 1.5rem; margin: 0.2rem 0; }
#intro p { color: #5f6b7a; margin: 0; max-width: 75ch; line-height: 1.45; }
#text textarea { font-family: ui-monospace, Menlo, "DejaVu Sans Mono", monospace; font-size: 0.85rem; }
#panes { align-items: flex-start; gap: 1.5rem; flex-wrap: wrap; }
#panes > * { flex: 1 1 340px !important; min-width: min(340px, 100%) !important; }
.error { background: #fdeee4; border-left: 4px solid #d55e00; padding: 0.6rem 0.8rem; }
.note { color: #5f6b7a; font-size: 0.8rem; margin: 0.2rem 0; }
.pane { color: #1b1f24; overflow-wrap: anywhere; }
.pane header { border-top: 2px solid #1b1f24; padding-top: 0.5rem; }
.pane h2 { font-size: 1.15rem; margin: 0; }
.pane h3 { font-size: 0.95rem; margin: 1.1rem 0 0.4rem; display: flex; justify-content: space-between; gap: 1rem; }
.pane .details { color: #5f6b7a; margin: 0; font-size: 0.82rem; }
.pane .loss { margin: 0.2rem 0; font-variant-numeric: tabular-nums; }
.pane .text { background: #ffffff; border: 1px solid #e2e6eb; border-radius: 6px; padding: 0.5rem; line-height: 1.7;
  max-height: 30rem; overflow-y: auto; font-size: 0.82rem; position: relative;
  font-family: ui-monospace, Menlo, "DejaVu Sans Mono", monospace; }
.pane .token { white-space: pre-wrap; cursor: pointer; border-radius: 3px; padding: 0.1rem 0; unicode-bidi: isolate;
  box-shadow: inset -1px 0 #ffffff; }
.pane .token:hover, .pane .token:focus-visible { outline: 1.5px solid #5f6b7a; }
.pane .token[aria-pressed] { outline: 2px solid #1b1f24; outline-offset: 0; }
.pane .legend { font-size: 0.78rem; color: #5f6b7a; display: flex; flex-wrap: wrap; gap: 0.15rem 0.8rem;
  align-items: center; margin: 0.4rem 0 0; }
.pane .swatch { display: inline-block; width: 0.8em; height: 0.8em; border-radius: 2px; border: 1px solid #c3cad4; }
.pane .next .swatch { width: 0.7em; height: 0.7em; }
.pane .ramp { display: inline-block; width: 8rem; height: 0.7em; border: 1px solid #e2e6eb; }
.pane svg { display: block; width: 100%; max-width: 560px; height: auto; touch-action: manipulation; }
.pane .edge { cursor: pointer; }
.pane .edge:hover, .pane .edge:focus-visible { stroke: #1b1f24; stroke-width: 1.2; outline: none; }
.pane .edge:focus-visible { stroke-width: 2.4; }
.pane .saving { display: inline-flex; gap: 0.3rem; flex: none; align-self: flex-start; }
.pane .save { font-size: 0.7rem; color: #5f6b7a; border: 1px solid #e2e6eb; border-radius: 4px; padding: 0.2rem 0.5rem;
  background: #ffffff; cursor: pointer; white-space: nowrap; }
.pane table { width: 100%; max-width: 560px; border-collapse: collapse; font-size: 0.8rem; table-layout: fixed; }
.pane th { text-align: left; font-weight: 500; width: 26%; overflow: hidden; text-overflow: ellipsis;
  white-space: nowrap;
  font-family: ui-monospace, Menlo, "DejaVu Sans Mono", monospace; padding: 0.1rem 0.3rem 0.1rem 0; }
.pane .bars i { display: block; height: 0.45rem; border-radius: 1px; }
.pane .number { width: 7.2rem; text-align: right; font-variant-numeric: tabular-nums; color: #5f6b7a; }
#attnres-tip { position: fixed; z-index: 1000; display: none; max-width: 19rem; background: #1b1f24; color: #fdfdfc;
  font: 12px/1.4 system-ui, sans-serif; padding: 0.25rem 0.5rem; border-radius: 4px; pointer-events: none; }
footer { display: none !important; }
"""
