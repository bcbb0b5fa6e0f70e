// The interactive part of the page of a comparison. The address stores the state, so that a view can be shared:
// #methods=fedshuffle&methods=fedavg&metric=accuracy&momentum=none&group=own&x=steps&scale=log
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const chart = document.getElementById("chart");
  const weights = document.getElementById("weights");
  const form = document.getElementById("controls");
  const boxes = [...document.querySelectorAll("input[name=method]")];
  const index = new Map(data.methods.map((method, k) => [method.name, k]));
  let at = null; // the place on the horizontal axis that is pointed at; null is the last
  if (!data.curves.length) return;

  document.documentElement.classList.add("js");

  // The state, in the controls and in the address -------------------------------------------------

  const chosen = (name) => form.elements[name].value;

  function state() {
    return {
      methods: boxes.filter((box) => box.checked).map((box) => box.value),
      metric: data.metrics.find((metric) => metric.name === chosen("metric")),
      momentum: chosen("momentum"),
      group: chosen("group"),
      x: chosen("x"),
      log: form.elements.scale.checked,
    };
  }

  function read() {
    const asked = new URLSearchParams(location.hash.slice(1));
    const options = {
      metric: data.metrics.map((metric) => metric.name),
      momentum: data.momenta,
      group: data.groups,
      x: Object.keys(data.axes),
    };
    for (const [name, known] of Object.entries(options)) if (known.includes(asked.get(name))) form.elements[name].value = asked.get(name);
    form.elements.scale.checked = asked.get("scale") === "log";
    const methods = asked.getAll("methods").flatMap((text) => (index.has(text) ? [text] : text.split(",")));
    for (const box of boxes) box.checked = !asked.has("methods") || methods.includes(box.value);
  }

  function remember() {
    const now = state();
    const words = new URLSearchParams();
    if (now.methods.length < boxes.length) for (const name of now.methods.length ? now.methods : [""]) words.append("methods", name);
    words.set("metric", now.metric.name);
    words.set("momentum", now.momentum);
    words.set("group", now.group);
    if (now.x !== "rounds") words.set("x", now.x);
    if (now.log) words.set("scale", "log");
    history.replaceState(null, "", "#" + words);
  }

  // Drawing ---------------------------------------------------------------------------------------

  function add(parent, tag, facts, text) {
    const node = document.createElementNS(chart.namespaceURI, tag);
    for (const [name, value] of Object.entries(facts)) node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text;
    parent.appendChild(node);
    return node;
  }

  // Round numbers between two ends: some six of them, or 1, 2, 5, 10, ... on a logarithmic axis.
  function ticks(low, high, log) {
    const found = [];
    if (log) {
      for (let k = Math.floor(Math.log10(low)); k <= Math.ceil(Math.log10(high)); k++)
        for (const m of [1, 2, 5]) if (m * 10 ** k >= low && m * 10 ** k <= high) found.push(m * 10 ** k);
      if (found.length > 12) return found.filter((tick) => Number.isInteger(Math.round(1e6 * Math.log10(tick)) / 1e6));
      if (found.length > 2) return found;
      found.length = 0;
    }
    const rough = (high - low) / 6;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((m) => m * power >= rough * 0.999);
    for (let k = Math.ceil(low / step); k * step <= high; k++) found.push(Number((k * step).toPrecision(12)));
    return found;
  }

  function scale(low, high, from, to, log) {
    const f = log ? Math.log : (value) => value;
    return (value) => from + ((f(value) - f(low)) / (f(high) - f(low))) * (to - from);
  }

  const plain = (value) => String(Number(value.toPrecision(6)));
  const tickText = (value, metric) => (metric.share ? plain(100 * value) + "%" : plain(value));
  function valueText(value, metric) {
    if (metric.share) return (100 * value).toFixed(2) + "%";
    return Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-4) ? value.toExponential(2) : value.toPrecision(4);
  }

  // Empties a drawing and lays out its axes.
  function axes(svg, x, y, words) {
    svg.querySelectorAll(":scope > :not(title)").forEach((node) => node.remove());
    const width = Math.max(svg.clientWidth, 280);
    const height = Number(svg.dataset.height);
    const box = { left: 58, right: width - 14, top: 14, bottom: height - 46 };
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("height", height);
    const place = {
      ...box,
      x: scale(x.low, x.high, box.left, box.right, x.log),
      y: scale(y.low, y.high, box.bottom, box.top, y.log),
    };
    const grid = add(svg, "g", { class: "grid" });
    for (const tick of ticks(y.low, y.high, y.log)) {
      add(grid, "line", { x1: box.left, x2: box.right, y1: place.y(tick), y2: place.y(tick) });
      add(grid, "text", { x: box.left - 8, y: place.y(tick) + 4, "text-anchor": "end" }, words.ytick(tick));
    }
    let last = -Infinity;
    for (const tick of ticks(x.low, x.high, x.log)) {
      if (place.x(tick) < last + Math.max(34, 9 * plain(tick).length)) continue;
      last = place.x(tick);
      add(grid, "text", { x: last, y: box.bottom + 18, "text-anchor": "middle" }, plain(tick));
      add(grid, "line", { x1: last, x2: last, y1: box.bottom, y2: box.bottom + 4, class: "tick" });
    }
    add(grid, "line", { x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom, class: "axis" });
    add(grid, "text", { x: (box.left + box.right) / 2, y: height - 6, "text-anchor": "middle", class: "name" }, words.x);
    add(grid, "text", { transform: `translate(13 ${(box.top + box.bottom) / 2}) rotate(-90)`, "text-anchor": "middle", class: "name" }, words.y);
    return place;
  }

  const path = (xs, ys) => xs.map((x, k) => `${k ? "L" : "M"}${x.toFixed(1)},${ys[k].toFixed(1)}`).join("");

  function marker(parent, method, x, y, size) {
    return add(parent, "path", { d: data.methods[method].path, class: "marker", transform: `translate(${x.toFixed(1)} ${y.toFixed(1)}) scale(${size})` });
  }

  let view = null; // the axes and curves in sight

  function drawCurves(now) {
    const limits = data.limits[now.group][now.metric.name];
    const curves = data.curves.filter((curve) => curve.group === now.group && curve.momentum === now.momentum);
    let low = limits[0];
    const positive = curves.flatMap((curve) => curve.metrics[now.metric.name].low).filter((value) => value > 0);
    const log = now.log && positive.length > 0;
    if (log && low <= 0) low = Math.min(...positive) / 1.1;
    const place = axes(
      chart,
      { low: 0, high: data.axes[now.x].ends[now.group], log: false },
      { low, high: limits[1], log },
      { x: data.axes[now.x].title, y: now.metric.title, ytick: (value) => tickText(value, now.metric) },
    );
    const clip = add(chart, "clipPath", { id: "inside" });
    add(clip, "rect", { x: place.left - 6, y: place.top - 6, width: place.right - place.left + 14, height: place.bottom - place.top + 6 });
    const layer = add(chart, "g", { "clip-path": "url(#inside)" });
    const clamp = (value) => Math.min(Math.max(place.y(log ? Math.max(value, low / 2) : value), -1e4), 1e4);
    const shown = curves.filter((curve) => now.methods.includes(curve.method));
    shown.sort((one, other) => one.method.startsWith("fedshuffle") - other.method.startsWith("fedshuffle"));
    for (const curve of shown) {
      const k = index.get(curve.method);
      const line = curve.metrics[now.metric.name];
      const group = add(layer, "g", { class: `curve m${k}`, "data-method": curve.method });
      const xs = line[now.x].map(place.x);
      if (xs.length) {
        const high = line.high.map(clamp);
        const low = line.low.map(clamp);
        add(group, "path", { class: "band", d: path([...xs, ...[...xs].reverse()], [...high, ...low.reverse()]) + "z" });
        const mean = line.mean.map(clamp);
        add(group, "path", { class: "line", d: path(xs, mean) });
        const step = Math.max(1, Math.floor(xs.length / 7));
        for (let i = Math.floor((k * step) / data.methods.length); i < xs.length - step / 2; i += step) marker(group, k, xs[i], mean[i], 4);
        marker(group, k, xs.at(-1), mean.at(-1), 4);
      }
      for (const stop of line.stops) {
        const ends = stop[now.x].map(place.x);
        const values = stop.values.map(clamp);
        add(group, "path", { class: "lost", d: path(ends, values) });
        const y = Math.min(Math.max(clamp(stop.cross.value), place.top), place.bottom);
        add(group, "path", { class: "cross", d: "M-5,-5L5,5M-5,5L5,-5", transform: `translate(${place.x(stop.cross[now.x])} ${y})` });
      }
    }
    if (!shown.some((curve) => curve.metrics[now.metric.name].rounds.length + curve.metrics[now.metric.name].stops.length)) {
      const why = now.methods.length ? "Nothing was evaluated here yet." : "No method is chosen.";
      add(layer, "text", { x: (place.left + place.right) / 2, y: (place.top + place.bottom) / 2, "text-anchor": "middle", class: "empty" }, why);
    }
    const pointer = add(chart, "g", { class: "pointer", "aria-hidden": "true" });
    const places = [...new Set(shown.flatMap((curve) => curve.metrics[now.metric.name][now.x]))].sort((a, b) => a - b);
    view = { now, place, curves: shown, pointer, places, clamp };
    point();
  }

  // Which value of a curve is shown: the one at the round, or the last one within these local steps or seconds.
  function shownAt(line, now, here) {
    if (now.x === "rounds") return line.rounds.indexOf(here);
    const places = line[now.x];
    if (at === null) return places.length - 1;
    return here > places.at(-1) ? -1 : places.findLastIndex((place) => place <= here);
  }

  // Shows the values at the place pointed at, in the list of methods and on the curves.
  function point() {
    const { now, place, curves, pointer, places, clamp } = view;
    const here = at === null ? places.at(-1) : at;
    const last = at === null ? "the end" : `${here} ${data.axes[now.x].unit}`;
    const where = here === undefined ? "" : now.x === "rounds" ? `round ${here}` : last;
    pointer.replaceChildren();
    document.getElementById("round").textContent = where && `at ${where}`;
    if (at !== null) add(pointer, "line", { x1: place.x(here), x2: place.x(here), y1: place.top, y2: place.bottom });
    const spoken = [];
    for (const box of boxes) {
      const out = box.closest("label").querySelector("output");
      const curve = curves.find((one) => one.method === box.value);
      const line = curve && curve.metrics[now.metric.name];
      const k = line ? shownAt(line, now, here) : -1;
      out.replaceChildren();
      if (k < 0) {
        out.textContent = !line ? "" : line.stops.length && !line.rounds.length ? "diverged" : "–";
        continue;
      }
      const value = valueText(line.mean[k], now.metric);
      const strong = document.createElement("b");
      strong.textContent = value;
      out.append(strong, " ");
      const apart = document.createElement("small");
      const range = line.runs[k] > 1 ? `${valueText(line.low[k], now.metric).replace("%", "")} to ${valueText(line.high[k], now.metric)}` : "one run";
      apart.textContent = line.runs[k] > 1 && line.runs[k] < data.seeds ? `${line.runs[k]} runs: ${range}` : range;
      out.append(apart);
      spoken.push(`${data.methods[index.get(box.value)].label} ${value}`);
      const y = clamp(line.mean[k]);
      if (at !== null && y >= place.top - 4 && y <= place.bottom + 4) {
        const dot = marker(pointer, index.get(box.value), place.x(line[now.x][k]), y, 5.5);
        dot.classList.add(`m${index.get(box.value)}`);
      }
    }
    chart.setAttribute("aria-valuemin", places[0] ?? 0);
    chart.setAttribute("aria-valuemax", places.at(-1) ?? 0);
    chart.setAttribute("aria-valuenow", here ?? 0);
    chart.setAttribute("aria-valuetext", where ? `${where}: ${spoken.join(", ")}` : "no values");
  }

  function drawWeights(now) {
    if (!weights) return;
    const audits = data.audits.filter((audit) => audit.momenta.includes(now.momentum));
    const sizes = data.audits.flatMap((audit) => audit.points.map((point) => point[0]));
    if (!sizes.length) return;
    const low = Math.min(...sizes);
    const high = Math.max(...sizes);
    const place = axes(
      weights,
      { low: low / 1.2, high: high * 1.2, log: true },
      { low: data.ratios[0], high: data.ratios[1], log: true },
      { x: "examples of the client", y: "counts … times what was meant", ytick: (value) => plain(value) + "×" },
    );
    add(weights, "line", { class: "one", x1: place.left, x2: place.right, y1: place.y(1), y2: place.y(1) });
    for (const audit of audits.filter((one) => now.methods.includes(one.method))) {
      const k = index.get(audit.method);
      const group = add(weights, "g", { class: `dots m${k}`, "data-method": audit.method });
      for (const [size, ratio] of audit.points) marker(group, k, place.x(size), place.y(ratio), 3.2);
    }
  }

  function draw() {
    const now = state();
    drawCurves(now);
    drawWeights(now);
  }

  // Events ----------------------------------------------------------------------------------------

  function move(to) {
    at = to;
    point();
  }

  function follow(event) {
    const { place, places } = view;
    if (!places.length) return;
    const x = event.clientX - chart.getBoundingClientRect().left;
    const near = places.reduce((best, one) => (Math.abs(place.x(one) - x) < Math.abs(place.x(best) - x) ? one : best));
    move(near);
  }

  chart.addEventListener("pointermove", follow);
  chart.addEventListener("pointerdown", follow);
  chart.addEventListener("pointerleave", (event) => event.pointerType === "touch" || move(null));
  chart.addEventListener("blur", () => move(null));
  chart.addEventListener("keydown", (event) => {
    const { places } = view;
    if (!places.length) return;
    const here = at === null ? places.length - 1 : Math.max(0, places.indexOf(at));
    const far = Math.max(1, Math.round(places.length / 10));
    const to = {
      ArrowLeft: here - 1, ArrowDown: here - 1, ArrowRight: here + 1, ArrowUp: here + 1,
      PageDown: here - far, PageUp: here + far, Home: 0, End: places.length - 1,
    }[event.key];
    if (event.key === "Escape") move(null);
    if (to === undefined) return;
    event.preventDefault();
    move(places[Math.min(Math.max(to, 0), places.length - 1)]);
  });

  form.addEventListener("change", () => {
    at = null;
    remember();
    draw();
  });
  for (const button of form.querySelectorAll("button[data-all]"))
    button.addEventListener("click", () => {
      for (const box of boxes) box.checked = button.dataset.all === "yes";
      remember();
      draw();
    });
  form.addEventListener("submit", (event) => event.preventDefault());
  window.addEventListener("hashchange", () => {
    at = null;
    read();
    draw();
  });

  read();
  draw();
  new ResizeObserver(draw).observe(chart);
})();
