// Controller, ranks and engines: their memory, and what the engines generate.

import { api, bytes, h, number } from "./dom.js";
import { spark } from "./plot.js";

export async function processes({ runs, colors }) {
  const found = await api("processes", { runs: runs.map((run) => run.id) });
  return runs.map((run, i) => section(run, found[i], colors));
}

function section(run, found, colors) {
  const title = h("h2", {}, h("i", { class: "box", style: { background: run.color } }), run.name);
  if (!found.length) return [title, h("p", { class: "dim" }, "No figures yet: the first come at the end of the first step.")];
  const has = (name) => found.some((one) => (one.gauges[name] || []).some((v) => v !== null));
  const columns = [
    ["host_bytes", "host memory (PSS)", bytes, colors[0]],
    ["trainer_host_bytes", "resident (RSS)", bytes, colors[5]],
    ["tokens_per_second", "tokens/s generated", (v) => number(v, 0), colors[2]],
    ["trainer_peak_bytes", "GPU, peak", bytes, colors[1]],
    ["others_bytes", "GPU, engines and others", bytes, colors[3]],
    ["free_bytes", "GPU, free", bytes, colors[5]],
  ].filter(([name]) => has(name));
  const head = h("tr", {}, h("th", {}, "process"), columns.map(([, text]) => h("th", { colspan: 2 }, text)));
  const rows = found.map((one) => h("tr", {}, h("td", {}, one.name), columns.map(([name, , text, color]) => cell(one, name, text, color))));
  const span = found[0].rollouts;
  return [title, h("p", { class: "dim" }, `Rollouts ${span[0]} to ${span[span.length - 1]}; each curve begins at 0, and the number is its last value.`,
    has("host_bytes") ? " PSS counts shared pages once." : ""), h("div", { class: "scroll" }, h("table", { class: "grid fit" }, head, rows))];
}

function cell(one, name, text, color) {
  const values = one.gauges[name] || [], padded = [...values, ...Array(one.rollouts.length - values.length).fill(null)];
  const last = padded.filter((v) => v !== null).pop();
  if (last === undefined) return [h("td", {}), h("td", {})];
  return [h("td", { class: "num" }, text(last)), h("td", { class: "course" }, spark(padded, color, 110))];
}
