// The ledger's table, sorted by its headings and filtered by document, verdict and words. Without this file it is a plain table.
(() => {
  "use strict";

  const cellText = (row, column) => row.cells[column].textContent.trim();

  // A label and a control, the one naming the other.
  const labelled = (text, control) => {
    const label = document.createElement("label");
    label.append(`${text} `, control);
    return label;
  };

  const documentOf = (row) => row.querySelector("small").textContent.split(" § ")[0];

  const choice = (rows, key) => {
    const select = document.createElement("select");
    select.append(new Option("all", ""));
    for (const value of new Set(rows.map(key))) select.append(new Option(value, value));
    return select;
  };

  const equip = (ledger) => {
    const table = ledger.querySelector("table");
    const body = table && table.tBodies[0];
    if (!body) return;
    const headings = [...table.tHead.rows[0].cells];
    const verdictColumn = headings.findIndex((heading) => heading.textContent.trim() === "verdict");
    const verdictOf = (row) => cellText(row, verdictColumn);
    const rows = [...body.rows];

    const words = document.createElement("input");
    words.type = "search";
    const source = choice(rows, documentOf);
    const verdict = choice(rows, verdictOf);
    const count = document.createElement("span");
    count.setAttribute("role", "status");
    const form = document.createElement("form");
    form.setAttribute("role", "search");
    form.className = "ledger-filter";
    form.append(labelled("Words", words), labelled("Document", source), labelled("Verdict", verdict), count);
    form.addEventListener("submit", (event) => event.preventDefault());

    const filter = () => {
      const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const row of rows) {
        const text = row.textContent.toLowerCase();
        const fits =
          wanted.every((word) => text.includes(word)) &&
          (!source.value || documentOf(row) === source.value) &&
          (!verdict.value || verdictOf(row) === verdict.value);
        row.hidden = !fits;
        shown += fits;
      }
      count.textContent = `${shown} of ${rows.length} claims`;
    };
    for (const control of [words, source, verdict]) control.addEventListener("input", filter);

    const sortBy = (index) => {
      const ascending = headings[index].getAttribute("aria-sort") !== "ascending";
      for (const heading of headings) heading.setAttribute("aria-sort", "none");
      headings[index].setAttribute("aria-sort", ascending ? "ascending" : "descending");
      const order = (a, b) => cellText(a, index).localeCompare(cellText(b, index), "en", { numeric: true });
      body.append(...[...rows].sort((a, b) => (ascending ? order(a, b) : order(b, a))));
    };
    headings.forEach((heading, index) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = heading.textContent.trim();
      button.addEventListener("click", () => sortBy(index));
      heading.replaceChildren(button);
      heading.setAttribute("aria-sort", "none");
    });

    ledger.prepend(form);
    filter();
  };

  const start = () => document.querySelectorAll(".ledger").forEach(equip);
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
