"use strict";
(() => {
  const { cases } = JSON.parse(document.getElementById("data").textContent);
  const REGIMES = { cold_clean: "Device", graph: "Graph", call: "Call", cold_dirty: "Dirty caches", warm: "Warm" };
  const COLUMNS = ["Kernel", "Shape", "Dtype", "Triton", "compile", "eager", "Best baseline", "its p50",
    "over compile", "over best", "of attainable", "Bound by", "Outcome"];
  const STATS = ["min", "p10", "p50", "p90", "p95", "p99", "max", "tmean"];
  const COLOURS = { triton: "0b3c8c", torch_compile: "e08a1e", eager: "a9b4c2", copy: "59636e" };
  const OTHERS = ["2b9a8b", "b0559a", "6b8e23", "8c564b", "56a8d8", "6f3f8f"];
  const NUMBER = /^[-+]?[0-9]/;
  const state = { regime: null, sort: null, down: false, open: new Set() };
  const by = (id) => document.getElementById(id);

  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }

  function draw(tag, attributes = {}, ...children) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }

  const name = (of) => [of.kernel, of.shape, of.dtype].join("/");
  /* What Python wrote tersely, spelt out: the candidates of a case in the chosen regime. */
  function candidates(of, regime) {
    return of.candidates.flatMap(([name, label, by, role], at) => {
      const found = of.regimes[regime].timed[at];
      if (!found) return [];
      const about = { name, label, by, role };
      if (found.length === 2) return [{ ...about, status: found[0], reason: found[1] }];
      const [stats, counts, processes, steps] = found.map((text) => text.split(" "));
      return [{ ...about, stats, counts, processes, steps }];
    });
  }

  const texts = (of) => [of.kernel, of.shape, of.dtype, ...of.regimes[state.regime].row];
  const colours = (shown) => {
    const others = shown.filter((each) => !(each.name in COLOURS)).map((each) => each.name);
    return (each) => `var(--${COLOURS[each.name] ?? OTHERS[others.indexOf(each.name) % OTHERS.length]})`;
  };

  /* Words stand where a figure is missing: after all figures, whichever way the column is sorted. */
  function compare(one, other) {
    const [a, b] = [NUMBER.test(one), NUMBER.test(other)];
    if (a !== b) return a ? -1 : 1;
    const order = a ? sizes(one, other) : one.localeCompare(other, "en");
    return state.down ? -order : order;
  }

  /* Shapes compare by their numbers, one after the other. */
  function sizes(one, other) {
    const [a, b] = [one.split("x").map(parseFloat), other.split("x").map(parseFloat)];
    for (let at = 0; at < Math.min(a.length, b.length); at++) {
      if (a[at] !== b[at] && !Number.isNaN(a[at]) && !Number.isNaN(b[at])) return a[at] - b[at];
    }
    return a.length - b.length;
  }

  function chosen() {
    const words = by("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = { kernel: by("kernel").value, dtype: by("dtype").value, outcome: by("outcome").value };
    return cases.filter((of) => {
      const cell = of.regimes[state.regime];
      if (!cell || (wanted.kernel && of.kernel !== wanted.kernel) || (wanted.dtype && of.dtype !== wanted.dtype)) return false;
      if (wanted.outcome && cell.outcome !== wanted.outcome) return false;
      const text = texts(of).join(" ").toLowerCase();
      return words.every((word) => text.includes(word));
    });
  }

  function fill() {
    const found = chosen();
    if (state.sort !== null) found.sort((a, b) => compare(texts(a)[state.sort], texts(b)[state.sort]));
    const body = by("table").tBodies[0];
    body.replaceChildren(...found.flatMap(rows));
    const all = cases.filter((of) => of.regimes[state.regime]).length;
    by("count").textContent = `${found.length} of ${all} cells`;
  }

  function rows(of) {
    const cell = of.regimes[state.regime];
    const id = `cell-${cases.indexOf(of)}`;
    const opened = state.open.has(of);
    const button = make("button", { class: "open", type: "button", "aria-expanded": opened, "aria-controls": id }, of.kernel);
    button.addEventListener("click", () => toggle(of, button));
    const row = make("tr", { "data-outcome": cell.outcome }, make("td", {}, button));
    texts(of).slice(1).forEach((text, at) => row.append(make("td", { class: classes(at + 1, text) }, text)));
    return opened ? [row, details(of, id)] : [row];
  }

  function classes(at, text) {
    const kinds = [];
    if (at >= 3 && COLUMNS[at] !== "Best baseline" && at < 11) kinds.push("n", ...(NUMBER.test(text) ? [] : ["word"]));
    if (at === 3) kinds.push("ours");
    if (at === COLUMNS.length - 1) kinds.push("outcome");
    return kinds.join(" ");
  }

  function toggle(of, button) {
    const row = button.closest("tr");
    if (state.open.delete(of)) {
      row.nextElementSibling.remove();
      history.replaceState(null, "", location.pathname + location.search);
    } else {
      state.open.add(of);
      row.after(details(of, button.getAttribute("aria-controls")));
      history.replaceState(null, "", `#cell=${name(of)}`);
    }
    button.setAttribute("aria-expanded", state.open.has(of));
  }

  function details(of, id) {
    const cell = of.regimes[state.regime];
    const shown = candidates(of, state.regime);
    const timed = shown.filter((each) => each.stats);
    const inside = make("div", { class: "inside" },
      make("div", {}, make("h3", {}, `Samples, ${REGIMES[state.regime].toLowerCase()} time`), ...(timed.length ? ecdf(timed) : ["No samples."])),
      make("div", {}, make("h3", {}, "What ran"), facts(of, cell, shown)),
      make("div", { class: "wide" }, make("h3", {}, "Statistics (us)"), statistics(shown)),
      make("div", { class: "wide" }, make("h3", {}, "p50 in every regime (us)"), regimes(of)));
    return make("tr", { class: "details", id }, make("td", { colspan: COLUMNS.length }, inside));
  }

  function facts(of, cell, shown) {
    const ours = shown.find((each) => each.role === "triton");
    const lines = [...cell.facts, ["Served by", ours ? ours.by : "-"], ...of.facts];
    return make("dl", {}, ...lines.flatMap(([term, text]) => [make("dt", {}, term), make("dd", {}, text)]));
  }

  function small(headers, lines) {
    const right = (at) => (at && at < headers.length - 1 ? { class: "n" } : {});
    const cellOf = (text, at) => make("td", right(at), String(text));
    return make("table", {},
      make("thead", {}, make("tr", {}, ...headers.map((text, at) => make("th", { scope: "col", ...right(at) }, text)))),
      make("tbody", {}, ...lines.map((line) => make("tr", {}, ...line.map(cellOf)))));
  }

  function statistics(shown) {
    const lines = shown.map((each) => each.stats
      ? [each.label, ...each.stats, ...each.counts, each.processes.join(", ")]
      : [each.label, ...STATS.map(() => "-"), "-", "-", "-", `${each.status}: ${each.reason}`]);
    return small(["Candidate", ...STATS, "samples", "flagged", "processes", "p50 of each process"], lines);
  }

  function regimes(of) {
    const present = Object.keys(REGIMES).filter((regime) => of.regimes[regime]);
    const lines = of.candidates.map(([name, label, by]) => [label, ...present.map((regime) => {
      const found = candidates(of, regime).find((each) => each.name === name);
      return found ? (found.stats ? found.stats[2] : found.status) : "-";
    }), by]);
    return small(["Candidate", ...present.map((regime) => REGIMES[regime].toLowerCase()), "served by"], lines);
  }

  function quantiles(steps) {
    let sum = 0;
    return steps.map((step) => (sum += Number(step)) / 1000);
  }

  /* A step curve a candidate, around Triton; one that lies beyond the edge stands in the key alone. */
  function ecdf(timed) {
    const colour = colours(timed);
    const curves = timed.map((each) => ({ each, at: quantiles(each.steps) }));
    const middle = (curve) => curve.at[(curve.at.length - 1) / 2];
    const ours = curves.find((curve) => curve.each.role === "triton") ?? curves[0];
    const near = curves.filter((curve) => middle(curve) < 1.6 * middle(ours));
    const low = Math.min(...near.map((curve) => curve.at[0]));
    const high = Math.max(...near.map((curve) => curve.at[curve.at.length - 2]));
    const [width, height, left, bottom] = [520, 230, 34, 24];
    const x = (us) => left + (us - low) / (high - low || 1) * (width - left - 12);
    const y = (share) => 8 + (1 - share) * (height - bottom - 8);
    const svg = draw("svg", { class: "ecdf", viewBox: `0 0 ${width} ${height}`, role: "img",
      "aria-label": `Share of samples at or below a time, ${low.toFixed(2)} to ${high.toFixed(2)} us` });
    for (const share of [0, 0.25, 0.5, 0.75, 1]) {
      svg.append(draw("line", { class: "grid", x1: left, x2: width, y1: y(share), y2: y(share) }),
        draw("text", { x: left - 5, y: y(share) + 3, "text-anchor": "end" }, share === 0.5 ? "p50" : `${100 * share} %`));
    }
    for (const us of ticks(low, high)) {
      svg.append(draw("line", { class: "grid", x1: x(us), x2: x(us), y1: y(0), y2: y(0) + 4 }),
        draw("text", { x: x(us), y: height - 8, "text-anchor": "middle" }, `${+us.toPrecision(6)}`));
    }
    svg.append(draw("text", { x: width, y: height - 8, "text-anchor": "end" }, "us"));
    for (const curve of near) {
      const last = curve.at.length - 1;
      let path = `M${x(curve.at[0]).toFixed(1)} ${y(0).toFixed(1)}`;
      curve.at.forEach((us, at) => {
        if (us <= high) path += `H${x(us).toFixed(1)}V${y(at / last).toFixed(1)}`;
      });
      const line = draw("path", { d: path, ...(curve === ours ? { class: "ours" } : {}) });
      line.style.stroke = colour(curve.each);
      svg.append(line);
    }
    const key = curves.map((curve) => {
      const mark = make("i");
      mark.style.background = colour(curve.each);
      return make("li", {}, mark, `${curve.each.label} ${curve.each.stats[2]}${near.includes(curve) ? "" : " (beyond)"}`);
    });
    return [svg, make("ul", { class: "key" }, ...key)];
  }

  function ticks(low, high) {
    const raw = (high - low) / 7 || 1;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= raw);
    const found = [];
    for (let at = Math.ceil(low / step); at * step <= high - 0.04 * (high - low); at++) found.push(at * step);
    return found;
  }

  function head() {
    const row = by("table").tHead.rows[0];
    COLUMNS.forEach((text, at) => {
      const button = make("button", { type: "button" }, text);
      const cell = make("th", { scope: "col", "aria-sort": "none", ...(classes(at, "0").startsWith("n") ? { class: "n" } : {}) }, button);
      button.addEventListener("click", () => {
        state.down = state.sort === at ? !state.down : false;
        state.sort = at;
        for (const each of row.cells) each.setAttribute("aria-sort", "none");
        cell.setAttribute("aria-sort", state.down ? "descending" : "ascending");
        fill();
      });
      row.append(cell);
    });
  }

  function controls() {
    for (const field of ["kernel", "dtype"]) {
      by(field).append(...[...new Set(cases.map((of) => of[field]))].map((value) => make("option", { value }, value)));
    }
    for (const [regime, label] of Object.entries(REGIMES)) {
      const there = cases.some((of) => of.regimes[regime]);
      const input = make("input", { type: "radio", name: "regime", value: regime, ...(there ? {} : { disabled: "" }) });
      if (there && state.regime === null) {
        state.regime = regime;
        input.checked = true;
      }
      by("regimes").append(make("label", {}, input, make("b", {}, label)));
    }
    const form = by("controls");
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("input", (event) => {
      if (event.target.name === "regime") state.regime = event.target.value;
      fill();
    });
  }

  function linked() {
    const wanted = decodeURIComponent(location.hash).match(/^#cell=(.+)$/);
    const of = wanted && cases.find((each) => name(each) === wanted[1]);
    if (!of) return;
    state.open.add(of);
    fill();
    by(`cell-${cases.indexOf(of)}`)?.previousElementSibling.scrollIntoView();
  }

  head();
  controls();
  if (state.regime === null) {
    by("count").textContent = "no cell was timed";
    return;
  }
  fill();
  linked();
})();
