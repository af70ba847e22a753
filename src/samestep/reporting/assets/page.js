"use strict";
/* Draws a report's charts from its data, each when it comes into sight; and what can be pressed. */
const told = JSON.parse(document.getElementById("charts").textContent);
const byId = (id) => document.getElementById(id);
const COLOURS = {
  data: "#cc79a7", forward: "#56b4e9", backward: "#e69f00", wait: "#d55e00", collective: "#8c4a2f",
  optimizer: "#009e73", other: "#8d9299", evaluate: "#0072b2", save: "#d8c700", load: "#b39ddb",
};
const ACTIONS = { F: ["forward", "#56b4e9"], B: ["backward", "#e69f00"], I: ["backward, inputs", "#e69f00"], W: ["backward, weights", "#009e73"] };
const BUCKET = "#7c6fd0";
const CONFIG = { responsive: true, displaylogo: false, showSendToCloud: false, plotlyServerURL: "", modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };

/* plotly reads some HTML in texts: a name from a run must stay a name. */
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").slice(0, 200);
const milliseconds = (value) => (value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2)) + " ms";

/* --- figures: [traces, layout] by the chart's name ------------------------------------------------ */

const current = { step: 0, gantt: 0, logarithmic: false };

function bars(name, colour, boxes, width, extra) {
  return {
    type: "bar", orientation: "h", name, legendgroup: name, marker: { color: colour, ...extra?.marker }, width,
    base: boxes.map((box) => box[0]), x: boxes.map((box) => box[1]), y: boxes.map((box) => box[2]),
    customdata: boxes.map((box) => box[3]), hovertemplate: "%{customdata}<extra></extra>", textposition: "none",
    ...extra, marker: { color: colour, line: { width: 0 }, ...extra?.marker },
  };
}

function lanes(count, ranks) {
  const height = Math.max(220, Math.min(1600, 110 + count * (count > 16 ? 30 : 54)));
  return {
    height, barmode: "overlay", bargap: 0,
    yaxis: { autorange: false, range: [count - 0.35, -0.6], tickvals: ranks.map((_, row) => row), ticktext: ranks.map((rank) => `rank ${rank}`), zeroline: false, showgrid: false, fixedrange: count <= 16 },
    xaxis: { title: { text: "ms from the step's begin", standoff: 8 }, zeroline: false },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
    margin: { l: 70, r: 20, t: 40, b: 50 }, hovermode: "closest",
  };
}

function timeline() {
  const moment = told.moments[current.step];
  if (!moment) return null;
  const phases = {}, travelling = [], full = [];
  moment.lanes.forEach(([rank, spans, buckets], row) => {
    for (const [name, begin, length, label] of spans) {
      const hover = `rank ${rank}: ${plain(name)}${label ? " " + plain(label) : ""}<br>${milliseconds(length / 1e3)} from ${milliseconds(begin / 1e3)}`;
      (phases[name] ??= []).push([begin / 1e3, length / 1e3, row - 0.15, hover]);
    }
    for (const [number, size, ready, begun, done] of buckets) {
      const hover = `rank ${rank}: bucket ${number}, ${(size / 1e6).toFixed(2)} MB`;
      if (ready !== null) full.push([ready / 1e3, row + 0.27, `${hover}<br>full at ${milliseconds(ready / 1e3)}`]);
      if (begun !== null && done !== null && done > begun)
        travelling.push([begun / 1e3, (done - begun) / 1e3, row + 0.27, `${hover}<br>on its way for ${milliseconds((done - begun) / 1e3)} from ${milliseconds(begun / 1e3)}`]);
    }
  });
  const order = Object.keys(COLOURS).filter((name) => phases[name]).concat(Object.keys(phases).filter((name) => !COLOURS[name]));
  const traces = order.map((name) => bars(plain(name), COLOURS[name] ?? "#777777", phases[name], 0.5));
  if (travelling.length) traces.push(bars("bucket on its way", BUCKET, travelling, 0.22, { opacity: 0.75, marker: { line: { width: 1, color: paper().card } } }));
  if (full.length)
    traces.push({
      type: "scatter", mode: "markers", name: "bucket full", x: full.map((one) => one[0]), y: full.map((one) => one[1]),
      customdata: full.map((one) => one[2]), hovertemplate: "%{customdata}<extra></extra>",
      marker: { symbol: "line-ns-open", size: 10, color: BUCKET, line: { width: 2, color: BUCKET } },
    });
  return [traces, lanes(moment.lanes.length, moment.lanes.map(([rank]) => rank))];
}

function gantt() {
  const step = told.gantts[current.gantt];
  if (!step) return null;
  const kinds = {}, row = new Map(step.ranks.map((rank, place) => [rank, place]));
  for (const [rank, kind, stage, micro, begin, end] of step.boxes)
    (kinds[kind] ??= []).push([begin, end - begin, row.get(rank), `rank ${rank}: ${plain(kind)}${micro} of stage ${stage}<br>${milliseconds(end - begin)} from ${milliseconds(begin)}`, String(micro)]);
  const traces = Object.entries(kinds).map(([kind, boxes]) => {
    const [name, colour] = ACTIONS[kind] ?? [plain(kind), "#777777"];
    const text = { text: boxes.map((box) => box[4]), textposition: "inside", insidetextanchor: "middle", textangle: 0, constraintext: "none", textfont: { color: "#111111" } };
    return bars(name, colour, boxes, 0.7, { ...text, marker: { line: { width: 1, color: paper().card } } });
  });
  return [traces, lanes(step.ranks.length, step.ranks)];
}

function course() {
  const { steps, phases, slowest } = told.course;
  if (!steps.length) return null;
  const one = steps.length === 1;
  const traces = Object.entries(phases).map(([name, y]) => ({
    type: one ? "bar" : "scatter", mode: "lines", name, x: steps, y, stackgroup: one ? undefined : "phases", line: { width: 0 }, fillcolor: COLOURS[name],
    marker: { color: COLOURS[name] }, hovertemplate: "%{y:.2f} ms",
  }));
  traces.push({ type: "scatter", mode: one ? "markers" : "lines", name: "longest step", x: steps, y: slowest, line: { width: 1.2, color: paper().ink, dash: "dot" }, hovertemplate: "%{y:.2f} ms" });
  return [traces, {
    height: 420, hovermode: "x unified", barmode: "stack", xaxis: { title: { text: "step", standoff: 8 } }, yaxis: { title: { text: "ms of a step", standoff: 8 }, rangemode: "tozero" },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" }, margin: { l: 60, r: 20, t: 40, b: 50 },
  }];
}

function heat() {
  const map = told.heat;
  if (!map) return null;
  const middle = map.first.map((first, place) => (first === map.last[place] ? `step ${first}` : `steps ${first} to ${map.last[place]}`));
  const most = Math.max(10, Math.min(100, Math.max(...map.percent.map((row) => Math.max(...row.map(Math.abs))))));
  const dark = isDark();
  return [[{
    type: "heatmap", z: map.percent, x: map.last, y: map.ranks.map((rank) => `rank ${rank}`), customdata: map.own,
    text: map.ranks.map(() => middle), zmin: -most, zmax: most, xgap: 0, ygap: map.ranks.length > 40 ? 0 : 2,
    colorscale: [[0, "#2f7fbf"], [0.5, dark ? "#24282d" : "#f4f4f2"], [1, "#d5400c"]],
    hovertemplate: "%{y}, %{text}: %{z:+.1f} %<br>own time %{customdata:.2f} ms a step<extra></extra>",
    colorbar: { ticksuffix: " %", thickness: 12, outlinewidth: 0 },
  }], {
    height: Math.max(220, Math.min(1200, 110 + map.ranks.length * (map.ranks.length > 40 ? 9 : 30))),
    xaxis: { title: { text: "step", standoff: 8 } }, yaxis: { autorange: "reversed", type: "category", showgrid: false }, margin: { l: 75, r: 20, t: 34, b: 50 },
  }];
}

function curve(name) {
  const traces = [], link = getComputedStyle(byId("theme-probe")).color;
  const all = told.curves.filter((each) => each.name === name);
  for (const [place, each] of all.entries()) {
    const colour = place ? "#8d9299" : link, label = all.length > 1 ? `attempt ${each.attempt}` : plain(name);
    const band = { type: "scatter", mode: "lines", x: each.steps, line: { width: 0 }, hoverinfo: "skip", showlegend: false };
    const thick = each.highest.some((high, index) => high !== each.lowest[index]);
    if (thick) traces.push({ ...band, y: each.lowest }, { ...band, y: each.highest, fill: "tonexty", fillcolor: place ? "rgba(141,146,153,.2)" : "rgba(60,140,220,.25)" });
    traces.push({
      type: "scatter", mode: each.steps.length > 1 ? "lines" : "markers", name: label, x: each.steps, y: each.means, line: { width: 1.6, color: colour },
      customdata: each.steps.map((_, index) => [each.lowest[index], each.highest[index]]),
      hovertemplate: `step %{x}: %{y:.5g}${thick ? "<br>%{customdata[0]:.5g} to %{customdata[1]:.5g}" : ""}<extra></extra>`,
    });
    if (each.odd.length)
      traces.push({ type: "scatter", mode: "markers", name: "no number", x: each.odd, y: each.odd.map(() => 0.02), yaxis: "y2", marker: { symbol: "x", color: COLOURS.wait, size: 8 }, hovertemplate: "step %{x}: no finite number<extra></extra>" });
  }
  return [traces, {
    height: 270, xaxis: { title: { text: "step", standoff: 8 } }, yaxis: { type: current.logarithmic ? "log" : "linear" }, showlegend: all.length > 1,
    yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true }, legend: { orientation: "h", y: 1.02, yanchor: "bottom" },
    margin: { l: 55, r: 15, t: 30, b: 50 }, hovermode: "closest",
  }];
}

const FIGURES = { timeline, gantt, course, heat };

/* --- drawing ---------------------------------------------------------------------------------------- */

const drawn = new Set();

function isDark() {
  const theme = document.documentElement.dataset.theme;
  return !printing && (theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
}

let printing = false;

function paper() {
  return isDark() ? { card: "#1d2024", ink: "#e6e6e3", line: "#363b42" } : { card: "#ffffff", ink: "#1b1d20", line: "#e3e4e5" };
}

function draw(element) {
  const name = element.dataset.chart;
  const figure = name === "curve" ? curve(element.dataset.name) : FIGURES[name]();
  drawn.add(element);
  if (!figure) {
    element.textContent = "There is nothing to draw.";
    element.style.minHeight = "0";
    return;
  }
  const [traces, layout] = figure, { card, ink, line } = paper();
  const axis = { gridcolor: line, linecolor: line, zerolinecolor: line, automargin: true };
  const whole = {
    ...layout, paper_bgcolor: card, plot_bgcolor: card, font: { color: ink, family: "system-ui, sans-serif", size: 12.5 },
    hoverlabel: { bgcolor: card, font: { color: ink }, align: "left" }, modebar: { bgcolor: "rgba(0,0,0,0)", color: "#8d9299", activecolor: ink },
    xaxis: { ...axis, ...layout.xaxis }, yaxis: { ...axis, ...layout.yaxis },
  };
  Object.assign(element.style, { minHeight: "0", height: `${layout.height}px` });
  delete whole.height;  // plotly, when the window changes, takes the element's own
  Plotly.react(element, traces, { ...whole, autosize: true }, CONFIG);
}

const redraw = () => drawn.forEach((element) => element.offsetParent !== null && draw(element));
const waiting = new IntersectionObserver((seen) => seen.forEach((one) => {
  if (one.isIntersecting) {
    waiting.unobserve(one.target);
    draw(one.target);
  }
}), { rootMargin: "300px" });

/* --- what can be pressed ------------------------------------------------------------------------------ */

function fill(select, output, items, key, label, sentence) {
  if (!select || !items.length) return;
  const chart = byId(key === "step" ? "timeline" : "gantt");
  items.forEach((item, place) => select.add(new Option(label(item), place)));
  const show = (place) => {
    current[key] = Math.max(0, Math.min(items.length - 1, place));
    select.value = current[key];
    output.textContent = sentence(items[current[key]]);
    if (drawn.has(chart)) draw(chart);
  };
  select.addEventListener("change", () => show(Number(select.value)));
  show(Math.max(0, items.findIndex((item) => item.why === "the median step")));
  return show;
}

function tabs() {
  const all = [...document.querySelectorAll('[role="tab"]')];
  const choose = (tab) => {
    for (const each of all) {
      each.setAttribute("aria-selected", String(each === tab));
      each.tabIndex = each === tab ? 0 : -1;
      byId(each.getAttribute("aria-controls")).hidden = each !== tab;
    }
    byId(tab.getAttribute("aria-controls")).querySelectorAll(".chart").forEach((chart) => drawn.has(chart) && draw(chart));
  };
  const STEPS = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
  all.forEach((tab, place) => {
    tab.addEventListener("click", () => choose(tab));
    tab.addEventListener("keydown", (event) => {
      const by = STEPS[event.key];
      if (by === undefined) return;
      event.preventDefault();
      const next = Number.isFinite(by) ? all[(place + by + all.length) % all.length] : all[by < 0 ? 0 : all.length - 1];
      next.focus();
      choose(next);
    });
  });
}

function theme() {
  const button = byId("theme");
  const name = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-pressed", String(isDark()));
  };
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    name();
    redraw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (name(), redraw()));
  name();
}

function curves() {
  const names = [...new Set(told.curves.map((each) => each.name))];
  byId(names.length ? "scale-tools" : "no-curves").hidden = false;
  for (const name of names) {
    const figure = document.createElement("figure"), caption = document.createElement("figcaption"), chart = document.createElement("div");
    const own = told.curves.find((each) => each.name === name);
    caption.textContent = name;
    const note = [own.ranks > 1 ? `mean of ${own.ranks} ranks; the band from the lowest to the highest` : "", own.odd_count ? `${own.odd_count} × no finite number, first at step ${own.odd[0]}` : ""];
    const small = document.createElement("small");
    small.textContent = " " + note.filter(Boolean).join("; ");
    caption.append(small);
    Object.assign(chart, { className: "chart", role: "img", ariaLabel: `${name} over the steps` });
    Object.assign(chart.dataset, { chart: "curve", name });
    figure.append(caption, chart);
    byId("curves").append(figure);
  }
  byId("scale").addEventListener("change", (event) => {
    current.logarithmic = event.target.checked;
    redraw();
  });
}

function begin() {
  const probe = document.createElement("a");
  Object.assign(probe, { id: "theme-probe", hidden: true, href: "#" });
  document.body.append(probe);
  const show = fill(byId("step"), byId("step-told"), told.moments, "step", (item) => `${item.step}: ${item.why}`, (item) => {
    const left = item.lanes.reduce((sum, lane) => sum + lane[3], 0);
    return `${milliseconds(1e3 * item.seconds)} of training${left ? `; ${left} short pieces are not drawn` : ""}`;
  });
  byId("before")?.addEventListener("click", () => show?.(current.step - 1));
  byId("after")?.addEventListener("click", () => show?.(current.step + 1));
  fill(byId("gantt-step"), byId("gantt-told"), told.gantts, "gantt", (item) => String(item.step), (item) =>
    `${item.schedule}, ${item.stages} stages: ${milliseconds(1e3 * item.seconds)}, ${(100 * item.idle).toFixed(0)} % idle`);
  curves();
  tabs();
  theme();
  document.querySelectorAll(".chart").forEach((chart) => waiting.observe(chart));
  addEventListener("beforeprint", () => {
    printing = true;
    document.querySelectorAll('[role="tabpanel"]').forEach((panel) => panel.toggleAttribute("data-was-hidden", panel.hidden));
    document.querySelectorAll('[role="tabpanel"]').forEach((panel) => (panel.hidden = false));
    document.querySelectorAll(".chart").forEach(draw);
  });
  addEventListener("afterprint", () => {
    printing = false;
    document.querySelectorAll('[role="tabpanel"]').forEach((panel) => (panel.hidden = panel.hasAttribute("data-was-hidden")));
    redraw();
  });
  document.documentElement.dataset.ready = "yes";
}

/* The library is in the page compressed, in Python's base 85 with "," for "<"; the policy allows it by its digest. */
async function unpack(text) {
  const DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;,=>?@^_`{|}~";
  const value = new Uint8Array(128), missing = (5 - (text.length % 5)) % 5;
  [...DIGITS].forEach((letter, place) => (value[letter.charCodeAt(0)] = place));
  const padded = text + "~".repeat(missing), words = new DataView(new ArrayBuffer((padded.length / 5) * 4));
  for (let at = 0, word = 0; at < padded.length; word += 4) {
    let sum = 0;
    for (const end = at + 5; at < end; at += 1) sum = sum * 85 + value[padded.charCodeAt(at)];
    words.setUint32(word, sum);
  }
  const bytes = new Blob([words.buffer.slice(0, words.byteLength - missing)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(bytes).text();
}

async function load() {
  const script = document.createElement("script");
  script.textContent = await unpack(byId("library").textContent);
  document.head.append(script);
}

load().then(begin, () => (byId("no-library").hidden = false));
