// The explorer: filters, a chart and a table over generated/explorer.json. Without this file the page has a static table.
(() => {
  "use strict";

  const root = document.getElementById("flashlab-explorer");
  if (!root) return;

  const AXES = {
    name: "stage or library",
    length: "keys a sequence, at 32,768 tokens",
    inputs: "inputs",
    gpu: "GPU",
  };
  const VALUES = {
    tflops: "TFLOP/s",
    us: "median time, µs",
    peak: "% of the tensor cores' peak at the clock inside the calls",
    ratio: "times as fast as the baseline, in the same run",
  };
  const RUNS = { shown: "as the report shows them", newest: "the newest of each", every: "every run" };
  const FIELDS = ["gpu", "dtype", "mask", "head_dim", "shape", "inputs", "state"];
  const LABELS = { gpu: "GPU", dtype: "type", mask: "mask", head_dim: "head dim", shape: "shape", inputs: "inputs", state: "regime" };
  const START = {
    x: "name", y: "tflops", gpu: "", dtype: "float16", mask: "full", head_dim: "64", shape: "16x16x2048x64", inputs: "normal",
    state: "burst, hot L2", runs: "shown", base: "fa4", names: "", record: "",
  };
  const COLUMNS = ["name", "tflops", "us", "ratio", "peak", "gpu", "shape", "dtype", "mask", "inputs", "state", "clock", "samples", "run"];
  const HEADERS = { tflops: "TFLOP/s", us: "µs", ratio: "× baseline", peak: "% of peak", gpu: "GPU", dtype: "type", state: "regime", clock: "MHz" };
  const MOST_ROWS = 200;

  const element = (tag, properties = {}, ...children) => {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  };

  const script = (url) =>
    new Promise((resolve, reject) => {
      const tag = element("script", { src: url, onload: resolve, onerror: () => reject(new Error(`${url} was not found`)) });
      document.head.append(tag);
    });

  // Rows as objects; a word is looked up once, so equal words are one string.
  const read = (packed) => {
    const columns = Object.entries(packed.words).map(([name, { values, rows }]) => [name, rows.map((index) => values[index])]);
    columns.push(...Object.entries(packed.numbers));
    const count = columns.length ? columns[0][1].length : 0;
    return Array.from({ length: count }, (_, index) => Object.fromEntries(columns.map(([name, column]) => [name, column[index]])));
  };

  const distinct = (rows, field) => [...new Set(rows.map((row) => row[field]))];

  // The fields of START in the page's address; what is as at the start is left out.
  const fromAddress = (known) => {
    const asked = new URLSearchParams(location.search);
    const state = { ...START, gpu: known.gpu[0] };
    for (const name of Object.keys(START)) if (asked.has(name)) state[name] = asked.get(name);
    for (const name of FIELDS) if (state[name] !== "all" && !known[name].includes(state[name])) state[name] = known[name][0];
    if (!(state.x in AXES)) state.x = START.x;
    if (!(state.y in VALUES)) state.y = START.y;
    if (!(state.runs in RUNS)) state.runs = START.runs;
    return state;
  };

  const toAddress = (state, known) => {
    const asked = new URLSearchParams();
    const start = { ...START, gpu: known.gpu[0] };
    for (const [name, value] of Object.entries(state)) if (value !== start[name]) asked.set(name, value);
    const query = asked.toString();
    history.replaceState(null, "", query ? `?${query}` : location.pathname);
  };

  // What a row's ratio is against: the baseline's time at the same problem in the same state of the same run.
  const keyOf = (row) => [row.gpu, row.run, row.shape, row.dtype, row.mask, row.inputs, row.state].join("|");

  const chosen = (rows, state, bases) => {
    const over = state.x; // The field that the axis runs over is not filtered by.
    const wanted = FIELDS.filter((name) => {
      if (name === over || state[name] === "all") return false;
      if (over === "length") return name !== "shape";
      return name !== "head_dim"; // A shape has its own.
    });
    let found = rows.filter(
      (row) => wanted.every((name) => String(row[name]) === state[name]) && (over !== "length" || row.tokens),
    );
    const names = state.names ? new Set(state.names.split(",")) : null;
    if (names) found = found.filter((row) => names.has(row.name));
    // A stage's second row, with the log-sum-exp on, stands beside its own.
    if (state.runs !== "every") found = found.filter((row) => row.kind === "peer" || !row.lse);
    if (state.runs === "shown") found = found.filter((row) => row.shown);
    if (state.runs === "newest") {
      const newest = new Map();
      for (const row of found) newest.set([row.gpu, row.name, row.shape, row.dtype, row.mask, row.inputs, row.state].join("|"), row);
      found = [...newest.values()];
    }
    // Libraries below the stages, also where a later run timed them first.
    found.sort((one, other) => (one.kind === "peer") - (other.kind === "peer"));
    return found.map((row) => {
      const base = bases.get(`${keyOf(row)}|${state.base}`);
      return { ...row, ratio: base ? base / row.us : null };
    });
  };

  const number = (value) => (value === null || value === undefined ? "–" : Number(value.toPrecision(4)).toLocaleString("en"));
  const place = (row) => `${row.gpu}/runs/${row.run}.jsonl:${row.line}`;

  const save = (name, type, text) => {
    const link = element("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };

  const asCsv = (rows) => {
    const fields = [...COLUMNS, "line"];
    const cell = (value) => (value === null || value === undefined ? "" : /[",\n]/.test(value) ? `"${String(value).replace(/"/g, '""')}"` : value);
    return [fields, ...rows.map((row) => fields.map((name) => cell(row[name])))].map((line) => line.join(",")).join("\n") + "\n";
  };

  const draw = (state, rows) => {
    const drawn = rows.filter((row) => row[state.y] !== null);
    if (!drawn.length) return element("p", { textContent: "Nothing on record is like this. Choose another regime, shape or set of runs." });
    const narrow = root.clientWidth < 560;
    const facets = ["gpu", "dtype", "mask", "inputs"].filter((name) => name !== state.x && new Set(drawn.map((row) => row[name])).size > 1);
    const label = (row) => facets.map((name) => row[name]).concat(state.x === "name" ? [] : [row.name]).join(" · ");
    const series = distinct(drawn.map((row) => ({ label: label(row) })), "label");
    const tip = (row) => `${row.name}\n${row.shape} ${row.dtype} ${row.mask}\n${row.inputs}, ${row.state}\n${number(row.tflops)} TFLOP/s, ${number(row.us)} µs\n${row.run}`;
    const common = {
      style: { background: "transparent", fontSize: "12px", overflow: "visible" },
      width: Math.max(320, root.clientWidth),
      symbol: { domain: ["stage", "peer"], range: ["circle", "diamond"] },
      color: { domain: series, scheme: "tableau10", legend: series.length > 1 && state.x !== "name" },
    };
    const mark = { stroke: series.length > 1 ? label : "kind", symbol: "kind", title: tip, tip: true, r: 4.5, strokeWidth: 2 };
    mark.fill = mark.stroke;
    if (series.length <= 1) common.color = { domain: ["stage", "peer"], range: ["#0072b2", "#d55e00"] };
    let figure;
    if (state.x === "length") {
      figure = Plot.plot({
        ...common, height: 420, marginLeft: 55, grid: true,
        x: { type: "log", base: 2, label: AXES.length, tickFormat: (value) => value.toLocaleString("en"), ticks: distinct(drawn, "length") },
        y: { label: VALUES[state.y], zero: state.y !== "us", type: state.y === "us" ? "log" : "linear" },
        marks: [
          Plot.line(drawn, { x: "length", y: state.y, z: (row) => `${row.name}|${label(row)}`, stroke: mark.stroke, sort: "length", strokeOpacity: 0.6 }),
          Plot.dot(drawn, { x: "length", y: state.y, ...mark }),
        ],
      });
    } else {
      const order = distinct(drawn, state.x);
      figure = Plot.plot({
        ...common, height: 90 + 24 * order.length, marginTop: 45, marginLeft: narrow ? 135 : 170, marginRight: 20,
        x: { label: VALUES[state.y], zero: state.y !== "ratio", grid: true, type: state.y === "us" ? "log" : "linear" },
        y: { label: null, domain: order },
        marks: [
          Plot.axisX({ anchor: "top", label: VALUES[state.y] }),
          Plot.axisX({ anchor: "bottom", label: null }),
          state.y === "ratio" ? Plot.ruleX([1], { strokeDasharray: "4 3" }) : null,
          Plot.dot(drawn, { x: state.y, y: state.x, ...mark }),
        ],
      });
    }
    const best = drawn.reduce((one, other) => (other.tflops > one.tflops ? other : one));
    // The picture has one name; its parts are no elements of their own to a screen reader.
    for (const part of figure.querySelectorAll("g[aria-label]")) {
      part.dataset.mark = part.getAttribute("aria-label");
      part.removeAttribute("aria-label");
    }
    figure.setAttribute("role", "img");
    figure.setAttribute("aria-label", `${VALUES[state.y]} over ${AXES[state.x]}, ${drawn.length} marks; the highest rate is ${best.name}'s, ${number(best.tflops)} TFLOP/s. The table below has every number.`);
    return figure;
  };

  const table = (rows, onRecord) => {
    const head = element("tr", {}, ...COLUMNS.map((name) => element("th", { textContent: HEADERS[name] ?? name, scope: "col" })));
    const body = rows.slice(0, MOST_ROWS).map((row) =>
      element("tr", {}, ...COLUMNS.map((name) => {
        if (name !== "run") return element("td", { textContent: typeof row[name] === "number" ? number(row[name]) : row[name] ?? "–" });
        const link = element("a", { href: `?record=${encodeURIComponent(place(row))}`, textContent: row.run });
        link.addEventListener("click", (event) => {
          event.preventDefault();
          onRecord(place(row));
        });
        return element("td", {}, link);
      })),
    );
    return element("div", { className: "md-typeset__scrollwrap", tabIndex: 0, role: "region", ariaLabel: "The rows of the chart" },
      element("table", {}, element("thead", {}, head), element("tbody", {}, ...body)));
  };

  // One record as it stands in its file.
  const record = async (where) => {
    const match = /^([\w.-]+\/[\w-]+\/[\w.-]+\.jsonl):(\d+)$/.exec(where);
    if (!match) throw new Error(`wanted GPU/FOLDER/RUN.jsonl:LINE, got ${where}`);
    const file = `${match[1]}.gz`;
    const answer = await fetch(root.dataset.files + file);
    if (!answer.ok) throw new Error(`${file}: ${answer.status}`);
    let blob = await answer.blob();
    const start = new Uint8Array(await blob.slice(0, 2).arrayBuffer());
    // Some servers have it unpacked on the way.
    if (start[0] === 0x1f && start[1] === 0x8b) {
      blob = await new Response(blob.stream().pipeThrough(new DecompressionStream("gzip"))).blob();
    }
    const line = (await blob.text()).split("\n")[Number(match[2]) - 1];
    if (!line) throw new Error(`${match[1]} has no line ${match[2]}`);
    return [JSON.parse(line), file];
  };

  const start = (rows) => {
    const known = Object.fromEntries(FIELDS.map((name) => [name, distinct(rows, name).map(String)]));
    known.head_dim.sort((one, other) => one - other);
    const bases = new Map();
    for (const row of rows) if (!row.lse || row.kind === "peer") bases.set(`${keyOf(row)}|${row.name}`, row.us);
    const state = fromAddress(known);

    const select = (name, label, options) => {
      const control = element("select", { name });
      for (const [value, text] of options) control.append(new Option(text, value));
      control.addEventListener("change", () => {
        state[name] = control.value;
        state.record = "";
        show();
      });
      return [control, element("label", {}, `${label} `, control)];
    };
    const plain = (values) => values.map((value) => [value, value]);
    const names = [...distinct(rows.filter((row) => row.kind === "stage"), "name").sort(), ...distinct(rows.filter((row) => row.kind === "peer"), "name").sort()];
    const controls = {};
    const form = element("form", { className: "explorer-filter" });
    form.addEventListener("submit", (event) => event.preventDefault());
    const add = (name, label, options) => {
      const [control, labelled] = select(name, label, options);
      controls[name] = control;
      form.append(labelled);
    };
    add("y", "show", Object.entries(VALUES));
    add("x", "over", Object.entries(AXES));
    for (const name of FIELDS) add(name, LABELS[name], plain([...known[name], "all"]));
    add("runs", "runs", Object.entries(RUNS));
    add("base", "baseline", plain(names));

    const boxes = names.map((name) => {
      const box = element("input", { type: "checkbox", value: name });
      box.addEventListener("change", () => {
        const picked = boxes.filter((one) => one.checked).map((one) => one.value);
        state.names = picked.length === names.length ? "" : picked.join(",") || "-";
        show();
      });
      return box;
    });
    const all = (checked) => {
      const button = element("button", { type: "button", textContent: checked ? "all" : "none" });
      button.addEventListener("click", () => {
        state.names = checked ? "" : "-";
        show();
      });
      return button;
    };
    const which = element("details", {}, element("summary", { textContent: "Stages and libraries" }), all(true), " ", all(false),
      element("div", { className: "explorer-names" }, ...names.map((name, index) => element("label", {}, boxes[index], ` ${name}`))));

    const count = element("p", { role: "status" });
    const chart = element("div", { className: "explorer-chart" });
    const below = element("div");
    const detail = element("section", { ariaLabel: "Record" });
    let found = [];
    const csv = element("button", { type: "button", textContent: "CSV" });
    csv.addEventListener("click", () => save("flashlab.csv", "text/csv", asCsv(found)));
    const json = element("button", { type: "button", textContent: "JSON" });
    json.addEventListener("click", () => save("flashlab.json", "application/json", JSON.stringify(found, null, 1)));

    const open = (where) => {
      state.record = where;
      toAddress(state, known);
      record(where).then(
        ([content, file]) =>
          detail.replaceChildren(
            element("h2", { textContent: "Record", tabIndex: -1 }),
            element("p", {}, `${where}, commit ${content.source ? content.source.commit : "unknown"}, `, element("a", { href: root.dataset.files + file, textContent: "its file" })),
            element("pre", {}, element("code", { textContent: JSON.stringify(content, null, 2) })),
          ),
        (error) => detail.replaceChildren(element("p", { textContent: `No such record: ${error.message}` })),
      ).then(() => detail.querySelector("h2")?.focus());
    };

    const show = () => {
      toAddress(state, known);
      for (const [name, control] of Object.entries(controls)) control.value = state[name];
      const picked = state.names ? new Set(state.names.split(",")) : null;
      for (const box of boxes) box.checked = !picked || picked.has(box.value);
      for (const name of FIELDS) controls[name].parentElement.hidden = name === state.x;
      controls.shape.parentElement.hidden = state.x === "length";
      controls.head_dim.parentElement.hidden = state.x !== "length";
      controls.base.parentElement.hidden = state.y !== "ratio";
      found = chosen(rows, state, bases);
      chart.replaceChildren(draw(state, found));
      const cut = found.length > MOST_ROWS ? `, the first ${MOST_ROWS} in the table` : "";
      count.textContent = `${found.length} rows${cut}`;
      below.replaceChildren(table(found, open));
      if (!state.record) detail.replaceChildren();
    };

    root.replaceChildren(form, which, count, chart, element("p", {}, "Download these rows: ", csv, " ", json), below, detail);
    show();
    if (state.record) open(state.record);
    let width = root.clientWidth;
    new ResizeObserver(() => {
      if (root.clientWidth === width) return;
      width = root.clientWidth;
      chart.replaceChildren(draw(state, found));
    }).observe(root);
  };

  root.append(element("p", { textContent: "Loading the records…", role: "status" }));
  script(`${root.dataset.scripts}d3-7.9.0.min.js`)
    .then(() => Promise.all([script(`${root.dataset.scripts}plot-0.6.17.umd.min.js`), fetch(root.dataset.records).then((answer) => answer.json())]))
    .then(([, packed]) => start(read(packed)))
    .catch((error) => root.replaceChildren(element("p", { textContent: `The explorer could not start: ${error.message}` })));
})();
