"""The page's style, and the few lines of JavaScript that Gradio has no component for."""

HEAD = """
<meta name="color-scheme" content="light">
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
  const area = document.createElement("textarea");
  const old = () => { area.value = location.href; document.body.append(area); area.select();
                      document.execCommand("copy"); area.remove(); };
  if (navigator.clipboard) navigator.clipboard.writeText(location.href).catch(old); else old();
};
</script>
"""

ON_LOAD = "() => { document.body.classList.remove('dark'); return [location.search]; }"
SET_LINK = "(query) => { if (query) history.replaceState(null, '', query); }"
DOWNLOAD = """(data) => {
  if (data) attnresSave(new Blob([data], {type: "application/json"}), "attnres-view.json");
}"""

ON_PANE = """
const edge = (target) => ({
  model: +target.closest("[data-model]").dataset.model, read: +target.dataset.read, source: +target.dataset.source,
});
let focused = null;
const press = (event) => {
  const target = event.target.closest("[data-token],[data-read],[data-save]");
  if (!target) return false;
  if (target.dataset.save) {
    attnresFigure(target.closest("section").querySelector("svg"), target.dataset.save);
  } else if (target.dataset.token !== undefined) {
    focused = document.activeElement === target ? target.dataset.token : null;
    trigger("click", {token: +target.dataset.token});
  } else {
    attnresTip("");
    trigger("click", edge(target));
  }
  return true;
};
element.addEventListener("click", press);
element.addEventListener("keydown", (event) => {
  if ((event.key === "Enter" || event.key === " ") && event.target.matches("[data-token]")) {
    event.preventDefault();
    press(event);
  }
});
const point = (event) => {
  const target = event.target.closest("[data-tip]");
  const box = target && event.type === "focusin" ? target.getBoundingClientRect() : null;
  attnresTip(target && target.dataset.tip, box ? box.left : event.clientX, box ? box.bottom - 14 : event.clientY);
};
element.addEventListener("mousemove", point);
element.addEventListener("focusin", (event) => { if (event.target.matches(":focus-visible")) point(event); });
element.addEventListener("mouseleave", () => attnresTip(""));
element.addEventListener("focusout", () => attnresTip(""));
watch("value", () => {
  const target = focused !== null && element.querySelector('[data-token="' + focused + '"]');
  if (target && document.activeElement === document.body) target.focus({preventScroll: true});
  focused = null;
});
"""

CSS = """
body, gradio-app { background: #fdfdfc !important; color-scheme: light; }
.gradio-container { width: 100% !important; max-width: 1500px !important; margin: 0 auto !important; color: #1b1f24; }
.gradio-container .main { padding: 12px clamp(10px, 2.5vw, 32px) !important; }
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
.pane .text { background: #ffffff; border: 1px solid #e2e6eb; border-radius: 6px; padding: 0.5rem; line-height: 1.75;
  max-height: 24rem; overflow-y: auto; font-size: 0.82rem;
  font-family: ui-monospace, Menlo, "DejaVu Sans Mono", monospace; }
.pane .token { white-space: pre-wrap; cursor: pointer; border-radius: 3px; padding: 0.1rem 0; unicode-bidi: isolate;
  box-shadow: inset -1px 0 #ffffff; }
.pane .token:hover, .pane .token:focus-visible { outline: 1.5px solid #5f6b7a; }
.pane .token[aria-pressed] { outline: 2px solid #1b1f24; outline-offset: 0; }
.pane .legend { font-size: 0.78rem; color: #5f6b7a; display: flex; flex-wrap: wrap; gap: 0.15rem 0.8rem;
  align-items: center; margin: 0.4rem 0 0; }
.pane .swatch { display: inline-block; width: 0.8em; height: 0.8em; border-radius: 2px; border: 1px solid #c3cad4; }
.pane .ramp { display: inline-block; width: 8rem; height: 0.7em; border: 1px solid #e2e6eb; }
.pane svg { display: block; width: 100%; max-width: 680px; height: auto; touch-action: manipulation; }
.pane .edge { cursor: pointer; }
.pane .edge:hover { stroke: #1b1f24; stroke-width: 1.2; }
.pane .saving { display: inline-flex; gap: 0.3rem; flex: none; align-self: flex-start; }
.pane .save { font-size: 0.7rem; color: #5f6b7a; border: 1px solid #e2e6eb; border-radius: 4px; padding: 0.1rem 0.4rem;
  background: #ffffff; cursor: pointer; white-space: nowrap; }
.pane table { width: 100%; max-width: 680px; border-collapse: collapse; font-size: 0.8rem; table-layout: fixed; }
.pane th { text-align: left; font-weight: 500; width: 26%; overflow: hidden; text-overflow: ellipsis;
  white-space: nowrap;
  font-family: ui-monospace, Menlo, "DejaVu Sans Mono", monospace; padding: 0.1rem 0.3rem 0.1rem 0; }
.pane .bars i { display: block; height: 0.45rem; border-radius: 1px; }
.pane .number { width: 7.2rem; text-align: right; font-variant-numeric: tabular-nums; color: #5f6b7a; }
#attnres-tip { position: fixed; z-index: 1000; display: none; max-width: 19rem; background: #1b1f24; color: #fdfdfc;
  font: 12px/1.4 system-ui, sans-serif; padding: 0.25rem 0.5rem; border-radius: 4px; pointer-events: none; }
.pane .body { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(400px, 100%), 1fr)); column-gap: 2rem;
  align-items: start; }
.pane .body > div { min-width: 0; }
footer { display: none !important; }
"""
