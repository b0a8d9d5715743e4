// Draws the data block: sections of charts, the timeline, the rollout browser. Knows nothing about runs.
// All text is inserted as text (`node`, `textContent`), never as HTML: model output is untrusted.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const page = document.getElementById("page");
  const AXIS = "#5d6b7a", GRID = "#edf0f4", HEIGHT = 210;
  const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 1000000];
  const plots = [];

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
      scale, side, stroke: AXIS, font: "12px system-ui, sans-serif", size: side === 2 ? 32 : 54, gap: 4,
      grid: { show: side !== 1, stroke: GRID, width: 1 }, ticks: { show: false },
      values: (_, ticks) => ticks.map((tick) => (tick == null ? "" : show(tick)) + (unit === "%" && side !== 2 ? " %" : "")),
    };
  }

  function lineSeries(one) {
    const made = {
      label: one.label, stroke: one.tone, width: 1.75, scale: one.axis === "right" ? "r" : "y", spanGaps: true,
      points: { show: one.style === "points" || one.values.length < 40, size: 5, fill: one.tone },
      value: (_, value) => show(value, one.decimals),
    };
    if (one.style === "faint") Object.assign(made, { stroke: fade(one.tone, 0.5), width: 1.25, points: { show: false } });
    if (one.style === "steps") Object.assign(made, { paths: uPlot.paths.stepped({ align: 1 }), points: { show: false } });
    if (one.style === "bars") {
      Object.assign(made, { paths: uPlot.paths.bars({ size: [0.7, 60] }), fill: one.tone, width: 0, points: { show: false } });
    }
    return made;
  }

  function stacked(chart) {
    const sums = chart.x.map(() => 0);
    const tops = chart.series.map((one) => one.values.map((value, i) => (sums[i] += value || 0)));
    const series = chart.series.map((one, i) => ({
      label: one.label, stroke: one.tone, width: 0.5, fill: one.tone, scale: "y", points: { show: false },
      paths: chart.x.length > 60 ? uPlot.paths.stepped({ align: -1 }) : uPlot.paths.bars({ size: [0.86, 48] }),
      value: (_, __, ___, index) => show(index == null ? null : one.values[index]),
    }));
    // Draw the highest layer first, so that lower layers cover it.
    return { series: series.reverse(), values: tops.reverse() };
  }

  function limits(chart) {
    return (_, low, high) => {
      if (low == null || high == null) return [0, 1];
      const bottom = chart.floor == null ? low : Math.min(chart.floor, low);
      const room = (high - bottom || Math.abs(high) || 1) * 0.08;
      return [chart.floor != null && bottom >= chart.floor ? bottom : bottom - room, high + room];
    };
  }

  function sideways(low, high, count) {
    if (count > 1 && low !== high) {
      const pad = count <= 60 ? (high - low) / count / 1.6 : 0;
      return [low - pad, high + pad];
    }
    return [low - 1, high + 1];
  }

  function drawLines(box, chart) {
    const isSteps = chart.x_label === "step";
    const isStack = chart.kind === "stack";
    const made = isStack ? stacked(chart) : { series: chart.series.map(lineSeries), values: chart.series.map((one) => one.values) };
    const tones = chart.series.map((one) => (one.style === "faint" ? fade(one.tone, 0.5) : one.tone));
    if (isStack) tones.reverse();
    const hasRight = chart.series.some((one) => one.axis === "right");
    const options = {
      width: box.clientWidth || 500, height: chart.is_wide ? HEIGHT + 50 : HEIGHT + 10,
      scales: {
        x: chart.is_log_x ? { time: false, distr: 3, log: 2, range: (_, low, high) => [low / 1.5, high * 1.5] }
          : { time: false, range: (_, low, high) => sideways(low, high, chart.x.length) },
        y: { range: limits(chart) }, r: { range: limits({ floor: 0 }) },
      },
      axes: [
        Object.assign(axis("x", "", 2), { label: chart.x_label, labelSize: 18, labelGap: 0, labelFont: "12px system-ui, sans-serif" },
          isSteps ? { incrs: WHOLE } : {}, chart.is_log_x ? { splits: () => chart.x, filter: (_, splits) => splits } : {}),
        axis("y", chart.unit, 3),
      ],
      series: [{ label: chart.x_label, value: (_, value) => (isSteps && value != null ? `step ${value}` : show(value)) }, ...made.series],
      cursor: { points: { size: 6 }, drag: { x: true, y: false }, sync: isSteps ? { key: "steps" } : undefined },
      legend: { live: true, markers: { width: 0, fill: (_, i) => tones[i - 1] } },
    };
    if (chart.is_log_right) Object.assign(options.scales.r, { distr: 3, log: 10, range: (_, low, high) => uPlot.rangeLog(low, high, 10, false) });
    if (hasRight) options.axes.push(axis("r", chart.right_unit, 1));
    const plot = new uPlot(options, [chart.x, ...made.values], box);
    plots.push([plot, box]);
    box.dataset.points = chart.series.reduce((sum, one) => sum + one.values.filter((value) => value != null).length, 0);
  }

  // --- divided bars ---------------------------------------------------------------------------------------------------

  function legendOf(entries) {
    const made = node("div", "legend");
    for (const [name, tone] of entries) {
      const mark = node("i");
      mark.style.background = tone;
      made.append(node("span", "", mark, name));
    }
    return made;
  }

  function drawShares(box, chart) {
    const grid = node("div", "shares");
    const seen = new Set();
    let count = 0;
    for (const row of chart.rows) {
      const total = row.parts.reduce((sum, part) => sum + part[1], 0);
      const bar = node("div", "bar");
      for (const [name, amount] of row.parts) {
        const part = node("span");
        part.style.width = (100 * amount) / total + "%";
        part.style.background = chart.tones[name] || AXIS;
        part.title = `${name}: ${show(amount)} ${chart.unit} (${((100 * amount) / total).toFixed(1)} %)`;
        bar.append(part);
        seen.add(name);
        count += 1;
      }
      grid.append(node("div", "", row.label), bar, node("div", "sum", `${show(total)} ${chart.unit}`));
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
          ctx.fillStyle = kinds[kind] ? kinds[kind][1] : AXIS;
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
        for (const [start, step] of view.marks.length < 14 ? view.marks : []) {
          const x = u.valToPos(start, "x", true);
          if (x >= left - ratio && x < left + width - 40 * ratio) ctx.fillText(step ? `step ${step}` : "before", x + 2 * ratio, top);
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
    box.append(tabs, target, legendOf([...kinds, ["idle", "#ffffff"]]), told);
    const buttons = views.map((view) => {
      const button = node("button", "", view.label);
      button.addEventListener("click", () => open(view, button));
      tabs.append(button);
      return button;
    });
    open(views[0], buttons[0]);
  }

  function bubble(ctx, x, y, width, height, ratio) {
    ctx.fillStyle = "#ffffff";
    ctx.fillRect(x, y, width, height);
    ctx.strokeStyle = "#e3e8ee";
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
        series: [{ label: choice.value, values, tone: "#1f6feb", style: "line", axis: "left" }] });
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
        row.addEventListener("click", () => choose(rollout, row));
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
        mark.style.background = fade(browser.sources[source][1], 0.28);
        mark.title = `drafted by ${browser.sources[source][0]}`;
        text.append(mark);
      }
      const bar = node("div", "tokens");
      for (const [start, end, source] of rollout.bar) {
        const part = node("span");
        part.style.left = (100 * start) / rollout.tokens + "%";
        part.style.width = (100 * (end - start)) / rollout.tokens + "%";
        part.style.background = browser.sources[source][1];
        bar.append(part);
      }
      const facts = `step ${rollout.step}, draw ${rollout.draw}, sample ${rollout.sample}: reward ${show(rollout.reward)}, ` +
        `${rollout.tokens} tokens (${rollout.drafted} % drafted), finish reason ${rollout.end}` +
        (rollout.is_cut ? "; cut off here" : "");
      const parts = [node("div", "facts", facts), node("pre", "prompt", rollout.prompt), bar, text];
      if (rollout.bar.length) parts.push(legendOf([["policy", "#eef1f5"], ...browser.sources]));
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
  const later = [];

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
      made.append(table(["", ...runs.map((run) => run.name)], data.compare.table));
      const differing = data.compare.settings;
      made.append(node("h3", "", differing.length ? "Settings that differ" : "The settings are the same."));
      if (differing.length) made.append(table(["setting", ...runs.map((run) => run.name)], differing));
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
      table(["setting", "value"], run.settings))));
    for (const draw of later) draw();
  }

  build();
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
