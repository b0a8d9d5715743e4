// Draws the data block: sections of charts, the timeline, the rollout browser. Knows nothing about runs.
// All text is inserted as text (`node`, `textContent`), never as HTML: model output is untrusted.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const page = document.getElementById("page");
  const HEIGHT = 210, SUFFIXES = ["%", "s", "ms", "x"], PLAIN_TONE = "#1f6feb";
  // Canvases know no style sheet: their colours are looked up when they are drawn, and again when the reader's choice changes.
  const dark = window.matchMedia("screen and (prefers-color-scheme: dark)");
  let AXIS = "", GRID = "", GROUND = "", EDGE = "";
  const tone = (name) => (dark.matches && data.dark[name]) || name;
  const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 1000000];
  let plots = [];

  function node(tag, className, ...children) {
    const made = document.createElement(tag);
    if (className) made.className = className;
    for (const child of children) made.append(child instanceof Node ? child : String(child));
    return made;
  }

  function show(value, decimals) {
    if (value == null) return "";
    if (decimals != null) return value.toFixed(decimals);
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
    return value.toLocaleString("en", { maximumSignificantDigits: size >= 1000 ? 7 : 4, maximumFractionDigits: 4 });
  }

  const fade = (tone, share) => tone + Math.round(255 * share).toString(16).padStart(2, "0");

  // --- charts over one x ---------------------------------------------------------------------------------------------

  function axis(scale, unit, side) {
    return {
      scale, side, stroke: AXIS, font: "12px system-ui, sans-serif", size: side === 2 ? 32 : side === 1 ? 66 : 56, gap: 4,
      grid: { show: side !== 1, stroke: GRID, width: 1 }, ticks: { show: false },
      values: (_, ticks) => ticks.map((tick) => (tick == null ? "" : show(tick) + (SUFFIXES.includes(unit) ? ` ${unit}`.replace(" x", "x") : ""))),
    };
  }

  function lineSeries(one) {
    const made = {
      label: one.label, stroke: tone(one.tone), width: 1.75, scale: one.axis === "right" ? "r" : "y", spanGaps: true,
      points: { show: one.style === "points" || one.values.length < 40, size: 5, fill: tone(one.tone) },
      value: (_, value, __, index) => show(value, one.decimals) + (value != null && error(one, index) ? ` ± ${show(error(one, index))}` : ""),
    };
    if (one.style === "faint") Object.assign(made, { width: 1, dash: [4, 3], points: { show: one.values.length < 3, size: 4 } });
    if (one.style === "steps") Object.assign(made, { paths: uPlot.paths.stepped({ align: 1 }), points: { show: false } });
    if (one.style === "bars") {
      Object.assign(made, { paths: uPlot.paths.bars({ size: [0.7, 60] }), fill: tone(one.tone), stroke: EDGE, width: 0.5, points: { show: false } });
    }
    return made;
  }

  function stacked(chart) {
    const sums = chart.x.map(() => 0);
    const tops = chart.series.map((one) => one.values.map((value, i) => (sums[i] += value || 0)));
    const series = chart.series.map((one, i) => ({
      label: one.label, stroke: GROUND, width: 0.5, fill: tone(one.tone), scale: "y", points: { show: false },
      paths: chart.x.length > 60 ? uPlot.paths.stepped({ align: -1 }) : uPlot.paths.bars({ size: [0.86, 48] }),
      value: (_, __, ___, index) => show(index == null ? null : one.values[index]),
    }));
    // Draw the highest layer first, so that lower layers cover it.
    return { series: series.reverse(), values: tops.reverse() };
  }

  const error = (one, index) => (index == null || !one.errors ? 0 : one.errors[index] || 0);

  function limits(chart, side) {
    const errors = (chart.series || []).filter((one) => one.axis === side).flatMap((one) => one.errors || []);
    const most = errors.reduce((found, one) => Math.max(found, one || 0), 0);
    return (_, low, high) => {
      if (low == null || high == null) return [0, 1];
      const isAbove = low >= 0, isBelow = chart.ceiling != null && high <= chart.ceiling;
      [low, high] = [low - most, high + most];
      const bottom = chart.floor == null ? low : Math.min(chart.floor, low);
      const room = (high - bottom || Math.abs(high) || 1) * 0.08;
      const from = chart.floor != null && bottom >= chart.floor ? bottom : bottom - room;
      return [isAbove ? Math.max(from, 0) : from, isBelow ? Math.min(high + room, chart.ceiling) : high + room];
    };
  }

  // Standard errors, as bars with caps through their points.
  function paintErrors(chart) {
    return (plot) => {
      const ctx = plot.ctx, ratio = uPlot.pxRatio, { left, top, width, height } = plot.bbox;
      ctx.save();
      ctx.beginPath();
      ctx.rect(left, top, width, height);
      ctx.clip();
      for (const one of chart.series) {
        ctx.strokeStyle = tone(one.tone);
        ctx.lineWidth = 1.5 * ratio;
        one.values.forEach((value, i) => {
          if (value == null || !error(one, i)) return;
          const x = plot.valToPos(chart.x[i], "x", true), cap = 4 * ratio;
          const [low, high] = [-1, 1].map((sign) => plot.valToPos(value + sign * error(one, i), "y", true));
          ctx.beginPath();
          for (const [x0, y0, x1, y1] of [[x, low, x, high], [x - cap, low, x + cap, low], [x - cap, high, x + cap, high]]) {
            ctx.moveTo(x0, y0);
            ctx.lineTo(x1, y1);
          }
          ctx.stroke();
        });
      }
      ctx.restore();
    };
  }

  function sideways(x) {
    return (_, low, high) => {
      if (x.length < 2) return [x[0] - 1, x[0] + 1];  // for a single point, the library's own limits are far off
      const pad = x.length <= 60 ? (high - low) / x.length / 1.6 : 0;
      return low === high ? [low - 1, high + 1] : [low - pad, high + pad];
    };
  }

  // The ticks that leave room for their labels.
  function apart(plot, ticks) {
    let last = -Infinity;
    return ticks.map((tick) => {
      const at = plot.valToPos(tick, "x");
      if (at - last < 10 + 8 * show(tick).length) return null;
      last = at;
      return tick;
    });
  }

  function drawLines(box, chart) {
    const isSteps = chart.x_label === "step";
    const isStack = chart.kind === "stack";
    const made = isStack ? stacked(chart) : { series: chart.series.map(lineSeries), values: chart.series.map((one) => one.values) };
    const tones = chart.series.map((one) => tone(one.tone));
    if (isStack) tones.reverse();
    const [first, last] = [chart.x[0], chart.x[chart.x.length - 1]];
    const hasRight = chart.series.some((one) => one.axis === "right");
    const options = {
      width: box.clientWidth || 500, height: chart.is_wide ? HEIGHT + 50 : HEIGHT + 10,
      scales: {
        x: chart.is_log_x ? { time: false, distr: 3, log: 2, range: (_, low, high) => [low / 1.5, high * 1.5] }
          : { time: false, range: sideways(chart.x) },
        y: { range: limits(chart, "left") }, r: { range: limits({ floor: 0 }, "right") },
      },
      axes: [
        Object.assign(axis("x", "", 2), { label: chart.x_label, labelSize: 18, labelGap: 0, labelFont: "12px system-ui, sans-serif" },
          isSteps ? { incrs: WHOLE, values: (_, ticks) => ticks.map((tick) => (first <= tick && tick <= last ? show(tick) : "")) } : {},
          chart.is_log_x ? { splits: () => chart.x, filter: apart } : {}),
        axis("y", chart.unit, 3),
      ],
      series: [{ label: chart.x_label, value: (_, value) => (isSteps && value != null ? `step ${value}` : show(value)) }, ...made.series],
      cursor: { points: { size: 6 }, drag: { x: true, y: false }, sync: isSteps ? { key: "steps" } : undefined },
      legend: { live: true, markers: { width: 0, fill: (_, i) => tones[i - 1] } },
    };
    if (chart.is_log_right) Object.assign(options.scales.r, { distr: 3, log: 10, range: (_, low, high) => uPlot.rangeLog(low, high, 10, false) });
    if (hasRight) {
      const isCount = chart.series.every((one) => one.axis !== "right" || one.decimals === 0);
      options.axes.push(Object.assign(axis("r", chart.right_unit, 1), isCount ? { incrs: WHOLE } : {}));
    }
    const tell = (plot) => { box.dataset.ranges = JSON.stringify(["x", "y"].map((name) => [plot.scales[name].min, plot.scales[name].max])); };
    options.hooks = { draw: [paintErrors(chart), tell] };
    const plot = new uPlot(options, [chart.x, ...made.values], box);
    plots.push([plot, box]);
    box.dataset.points = chart.series.reduce((sum, one) => sum + one.values.filter((value) => value != null).length, 0);
  }

  // --- divided bars ---------------------------------------------------------------------------------------------------

  function legendOf(entries) {
    const made = node("div", "legend");
    for (const [name, colour] of entries) {
      const mark = node("i");
      mark.style.background = tone(colour);
      made.append(node("span", "", mark, name));
    }
    return made;
  }

  function drawShares(box, chart) {
    const grid = node("div", chart.is_absolute ? "shares absolute" : "shares");
    const seen = new Set();
    const sum = (row) => row.parts.reduce((found, part) => found + part[1], 0);
    const most = Math.max(...chart.rows.map(sum));
    let count = 0;
    for (const row of chart.rows) {
      const total = sum(row), whole = chart.is_absolute ? most : total;
      const gap = chart.is_absolute && row.label && grid.children.length ? " gap" : "";
      const bar = node("div", "bar" + gap);
      for (const [name, amount] of row.parts) {
        const part = node("span");
        part.style.width = (100 * amount) / whole + "%";
        part.style.background = chart.tones[name] ? tone(chart.tones[name]) : AXIS;
        part.title = `${name}: ${show(amount)} ${chart.unit}` + (chart.unit === "%" ? "" : ` (${((100 * amount) / total).toFixed(1)} %)`);
        bar.append(part);
        seen.add(name);
        count += 1;
      }
      grid.append(node("div", "label" + gap, row.label), bar, node("div", "sum" + gap, `${show(total)} ${chart.unit}`));
    }
    box.append(grid, legendOf(Object.entries(chart.tones).filter(([name]) => seen.has(name))));
    box.dataset.points = count;
  }

  // --- the timeline -----------------------------------------------------------------------------------------------------

  function drawTimeline(box, chart) {
    const { lanes, kinds, views } = chart.data;
    const tabs = node("div", "tabs"), target = node("div", "plot");
    let plot = null;

    function paint(view) {
      return (u) => {
        const ctx = u.ctx, ratio = uPlot.pxRatio, { left, top, width, height } = u.bbox;
        ctx.save();
        ctx.beginPath();
        ctx.rect(left, top, width, height);
        ctx.clip();
        const each = height / lanes.length, gap = 8 * ratio;
        lanes.forEach((_, i) => bubble(ctx, left, top + i * each + gap, width, each - 2 * gap, ratio));
        for (const [lane, kind, start, seconds, low, high] of view.boxes) {
          const x = Math.round(u.valToPos(start, "x", true)), right = Math.round(u.valToPos(start + seconds, "x", true));
          if (right < left || x > left + width) continue;
          const full = each - 2 * gap, y = top + lane * each + gap + full * (1 - high);
          ctx.fillStyle = kinds[kind] ? tone(kinds[kind][1]) : AXIS;
          ctx.fillRect(x, y, Math.max(right - x, ratio * 0.5), full * (high - low));
        }
        ctx.fillStyle = AXIS;
        for (const [start] of view.marks) {
          const x = u.valToPos(start, "x", true);
          ctx.fillRect(x, top, ratio * 0.75, height);
        }
        ctx.restore();
        ctx.save();
        ctx.fillStyle = AXIS;
        ctx.font = `${11 * ratio}px system-ui, sans-serif`;
        ctx.textAlign = "left";
        ctx.textBaseline = "bottom";
        let free = left - ratio;
        for (const [start, step] of view.marks) {
          const x = u.valToPos(start, "x", true), label = step ? `step ${step}` : "before", size = ctx.measureText(label).width + 6 * ratio;
          if (x < free || x + size > left + width) continue;
          ctx.fillText(label, x + 2 * ratio, top);
          free = x + size;
        }
        ctx.restore();
      };
    }

    function open(view, button) {
      for (const other of tabs.children) other.classList.toggle("on", other === button);
      if (plot) plot.destroy();
      let low = Infinity, high = -Infinity;
      for (const found of view.boxes) { low = Math.min(low, found[2]); high = Math.max(high, found[2] + found[3]); }
      for (const [start] of view.marks) low = Math.min(low, start);
      const names = axis("y", "", 3);
      Object.assign(names, { size: 84, grid: { show: false }, splits: () => lanes.map((_, i) => i + 0.5), values: () => lanes });
      plot = new uPlot({
        width: target.clientWidth || 900, height: Math.max(100, 40 * lanes.length + 62), padding: [16, 12, 0, 0],
        scales: { x: { time: false, range: (_, a, b) => (a == null ? [low, high] : [a, b]) }, y: { range: [0, lanes.length], dir: -1 } },
        axes: [Object.assign(axis("x", "", 2), { values: (_, ticks) => ticks.map((tick) => show(tick) + " s") }), names],
        series: [{ label: "seconds" }, { show: true, stroke: "transparent", points: { show: false } }],
        legend: { show: false }, cursor: { y: false, drag: { x: true, y: false } }, hooks: { draw: [paint(view)] },
      }, [[low, high], [0, 0]], target);
      plot.lanesView = view;
      hover(plot, view, lanes, kinds, told);
      plots.push([plot, target]);
      box.dataset.points = view.boxes.length;
    }

    const told = node("p", "hint", "Hover over a span to see what it is.");
    box.append(tabs, target, legendOf([...kinds, ["idle", GROUND]]), told);
    const buttons = views.map((view) => {
      const button = node("button", "", view.label);
      button.addEventListener("click", () => open(view, button));
      tabs.append(button);
      return button;
    });
    open(views[0], buttons[0]);
  }

  function bubble(ctx, x, y, width, height, ratio) {
    ctx.fillStyle = GROUND;
    ctx.fillRect(x, y, width, height);
    ctx.strokeStyle = GRID;
    ctx.lineWidth = ratio;
    ctx.strokeRect(x, y, width, height);
  }

  function hover(plot, view, lanes, kinds, told) {
    plot.over.addEventListener("mousemove", (event) => {
      const lane = Math.floor((event.offsetY / plot.over.clientHeight) * lanes.length);
      const at = plot.posToVal(event.offsetX, "x");
      const found = view.boxes.find((one) => one[0] === lane && one[2] <= at && at < one[2] + one[3]);
      const what = found ? `${kinds[found[1]][0]}, ${show(found[3])} s from ${show(found[2])} s` : "idle";
      told.textContent = `${lanes[lane] || ""}: ${what}`;
    });
  }

  // --- any metric ---------------------------------------------------------------------------------------------------------

  function drawMetrics(box, chart) {
    const names = Object.keys(chart.data.metrics);
    const choice = node("select"), target = node("div", "plot");
    for (const name of names) choice.append(new Option(name, name));
    if (names.includes("loss")) choice.value = "loss";
    const draw = () => {
      target.replaceChildren();
      const values = chart.data.metrics[choice.value];
      drawLines(target, { x: chart.data.x, kind: "lines", x_label: "step", is_wide: true, floor: null,
        series: [{ label: choice.value, values, tone: PLAIN_TONE, style: "line", axis: "left" }] });
    };
    choice.addEventListener("change", draw);
    box.append(choice, target);
    draw();
    box.dataset.points = names.length;
  }

  // --- rollouts -------------------------------------------------------------------------------------------------------------

  function drawBrowser(box, browser, key) {
    const state = new URLSearchParams(location.hash.slice(1));
    const inputs = {};
    const filters = node("div", "filters");
    const field = (name, label, className, type) => {
      const input = node("input", className);
      input.type = type;
      if (type === "number") input.step = "any";
      input.dataset.filter = name;
      input.value = state.get(key + name) || "";
      input.addEventListener("input", () => { remember(); fill(); });
      inputs[name] = input;
      return node("label", "", label, input);
    };
    const range = (name, label) => node("span", "", field(`${name}_from`, `${label} from`, "small", "number"),
      field(`${name}_to`, "to", "small", "number"));
    filters.append(range("step", "step"), range("reward", "reward"), range("tokens", "tokens"),
      field("text", "text contains ", "text", "search"));
    const list = node("div", "list"), reader = node("div", "reader"), count = node("span", "count");
    filters.append(count);

    function remember() {
      for (const [name, input] of Object.entries(inputs)) {
        if (input.value) state.set(key + name, input.value); else state.delete(key + name);
      }
      history.replaceState(null, "", "#" + state.toString());
    }

    function passes(rollout) {
      for (const name of ["step", "reward", "tokens"]) {
        const low = inputs[`${name}_from`].value, high = inputs[`${name}_to`].value;
        if (low !== "" && !(rollout[name] >= Number(low))) return false;
        if (high !== "" && !(rollout[name] <= Number(high))) return false;
      }
      const wanted = inputs.text.value.toLowerCase();
      return !wanted || rollout.search.includes(wanted);
    }

    function fill() {
      const found = browser.rollouts.filter(passes);
      count.textContent = `${found.length} of ${browser.rollouts.length} shown`;
      const head = node("tr", "", ...["step", "reward", "tokens", "drafted", "text"].map((name) => node("th", "", name)));
      const body = node("tbody");
      for (const rollout of found) {
        const row = node("tr", "", node("td", "", rollout.step), node("td", "", show(rollout.reward)),
          node("td", "", rollout.tokens), node("td", "", `${rollout.drafted} %`), node("td", "", rollout.start));
        row.tabIndex = 0;
        row.addEventListener("click", () => choose(rollout, row));
        row.addEventListener("keydown", (event) => { if (event.key === "Enter") choose(rollout, row); });
        body.append(row);
      }
      list.replaceChildren(node("table", "", node("thead", "", head), body));
      const first = Math.max(0, found.findIndex((rollout) => rollout.drafted >= 25));
      if (found.length) choose(found[first], body.children[first]);
      else reader.replaceChildren(node("p", "empty", "No sampled rollout passes these filters."));
    }

    function choose(rollout, row) {
      for (const other of list.querySelectorAll("tr.on")) other.classList.remove("on");
      row.classList.add("on");
      reader.replaceChildren(...page_of(rollout));
    }

    function page_of(rollout) {
      const text = node("pre", "response");
      for (const [piece, source] of rollout.pieces) {
        if (source < 0) { text.append(piece); continue; }
        const mark = node("mark", "", piece);
        mark.style.background = fade(tone(browser.sources[source][1]), 0.28);
        mark.title = `drafted by ${browser.sources[source][0]}`;
        text.append(mark);
      }
      const bar = node("div", "tokens");
      for (const [start, end, source] of rollout.bar) {
        const part = node("span");
        part.style.left = (100 * start) / rollout.tokens + "%";
        part.style.width = (100 * (end - start)) / rollout.tokens + "%";
        part.style.background = tone(browser.sources[source][1]);
        bar.append(part);
      }
      const facts = `step ${rollout.step}, draw ${rollout.draw}, sample ${rollout.sample}: reward ${show(rollout.reward)}, ` +
        `${rollout.tokens} tokens (${rollout.drafted} % drafted), finish reason ${rollout.end}` +
        (rollout.is_cut ? "; cut off here" : "");
      const parts = [node("div", "facts", facts), node("pre", "prompt", rollout.prompt), bar, text];
      if (rollout.bar.length) parts.push(legendOf([["policy", css("--track")], ...browser.sources]));
      return parts;
    }

    for (const rollout of browser.rollouts) {
      const text = rollout.pieces.map((piece) => piece[0]).join("");
      const drafted = rollout.bar.reduce((sum, [start, end]) => sum + end - start, 0);
      rollout.drafted = rollout.tokens ? Math.round((100 * drafted) / rollout.tokens) : 0;
      rollout.start = text.slice(0, 90).replace(/\s+/g, " ");
      rollout.search = (rollout.prompt + "\n" + text).toLowerCase();
    }
    box.append(filters, node("div", "browser", list, reader), node("p", "hint", browser.note));
    box.dataset.points = browser.rollouts.length;
    fill();
  }

  // --- the page ---------------------------------------------------------------------------------------------------------------

  const DRAWERS = { lines: drawLines, stack: drawLines, shares: drawShares, timeline: drawTimeline, metrics: drawMetrics };
  let later = [];

  function card(chart) {
    const made = node("div", chart.is_wide ? "card wide" : "card");
    if (chart.title) {
      const unit = [chart.unit, chart.right_unit].filter((one) => one && chart.kind !== "shares").join(", ");
      made.append(node("h3", "", chart.title, ...(unit ? [node("span", "unit", `  ${unit}`)] : [])));
    }
    const box = node("div", "plot");
    box.dataset.chart = chart.name;
    made.append(box);
    if (chart.note && chart.note.trim()) made.append(node("p", "hint", chart.note));
    later.push(() => DRAWERS[chart.kind](box, chart));
    return made;
  }

  function fillSection(parent, section) {
    if (section.lead) parent.append(node("p", "lead", section.lead));
    if (section.charts.length) parent.append(node("div", "grid", ...section.charts.map(card)));
    for (const sentence of section.left_out) if (sentence) parent.append(node("p", "empty", sentence));
  }

  function head(run) {
    const made = node("header", "", node("h1", "", run.name), node("p", "status", run.status));
    if (run.thinned) made.append(node("p", "status", run.thinned));
    for (const problem of run.problems) made.append(node("p", "problem", problem));
    made.append(node("div", "tiles", ...run.tiles.map((tile) => node("div", "tile", node("div", "label", tile.label),
      node("div", "value", tile.value), node("div", "note", tile.note)))));
    return made;
  }

  function table(header, rows) {
    return node("table", "plain", node("thead", "", node("tr", "", ...header.map((text) => node("th", "", text)))),
      node("tbody", "", ...rows.map((row) => node("tr", "", ...row.map((text) => node("td", "", text))))));
  }

  function addSection(nav, name, title, short) {
    const made = node("section", "", node("h2", "", title));
    made.id = name;
    const link = node("a", "", short || title);
    link.href = "#" + name;
    link.addEventListener("click", (event) => { event.preventDefault(); made.scrollIntoView({ behavior: "smooth" }); });
    nav.append(link);
    return made;
  }

  function build() {
    const runs = data.runs, isPair = runs.length > 1, nav = node("nav");
    if (isPair) page.classList.add("two");
    const side = (run) => node("div", "side", ...(isPair ? [node("div", "runname", run.name)] : []));
    page.append(isPair ? node("div", "sides", ...runs.map((run) => node("div", "side", head(run)))) : head(runs[0]), nav);
    if (data.compare) {
      const made = addSection(nav, "compare", data.compare.title);
      fillSection(made, data.compare);
      made.append(node("div", "scroll", table(["", ...runs.map((run) => run.name)], data.compare.table)));
      const differing = data.compare.settings;
      made.append(node("h3", "", differing.length ? "Settings that differ" : "The settings are the same."));
      if (differing.length) made.append(node("div", "scroll", table(["setting", ...runs.map((run) => run.name)], differing)));
      page.append(made);
    }
    runs[0].sections.forEach((section, i) => {
      const made = addSection(nav, section.name, section.title, section.short);
      const sides = runs.map((run) => { const one = side(run); fillSection(one, run.sections[i]); return one; });
      made.append(node("div", "sides", ...sides));
      page.append(made);
    });
    runs.forEach((run, i) => {
      const made = addSection(nav, `rollouts-${i}`, isPair ? `Rollouts of ${run.name}` : "Rollouts");
      if (run.browser.rollouts.length) {
        const box = node("div", "card");
        box.dataset.chart = "browser";
        made.append(box);
        later.push(() => drawBrowser(box, run.browser, isPair ? `${i}.` : ""));
      } else made.append(node("p", "empty", run.browser.note));
      page.append(made);
    });
    runs.forEach((run) => page.append(node("details", "", node("summary", "", `Settings of ${run.name}`),
      node("div", "scroll", table(["setting", "value"], run.settings)))));
    for (const draw of later) draw();
  }

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function draw() {
    [AXIS, GRID, GROUND, EDGE] = ["--soft", "--line", "--card", "--edge"].map(css);
    const place = window.scrollY;
    [plots, later] = [[], []];
    page.replaceChildren();
    build();
    window.scrollTo(0, place);
  }

  draw();
  dark.addEventListener("change", draw);
  let wait = null;
  window.addEventListener("resize", () => {
    clearTimeout(wait);
    wait = setTimeout(() => plots.forEach(([plot, box]) => {
      if (box.isConnected && box.clientWidth) plot.setSize({ width: box.clientWidth, height: plot.height });
    }), 120);
  });
  if (data.refresh_s) {
    // Do not interrupt typing; the filters are in the address and survive a reload.
    setInterval(() => { if (!["INPUT", "SELECT"].includes(document.activeElement.tagName)) location.reload(); }, 1000 * data.refresh_s);
  }
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
})();
