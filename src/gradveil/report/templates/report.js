"use strict";
// Pictures are decoded when they come into view, which thousands of them take seconds for; paper has to have them all.
addEventListener("beforeprint", () => {
  for (const image of document.images) image.loading = "eager";
});

// Makes the results sortable and filterable. Without this script the table is simply a table, so the controls are made here.
for (const table of document.querySelectorAll("table[data-sortable]")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const status = document.getElementById("results-status");

  // A number where the cell carries one, its text otherwise; null where a value is not available.
  const keyOf = (row, column) => {
    const cell = row.cells[column];
    if (cell.dataset.value === undefined) return cell.textContent.trim().toLowerCase();
    return cell.dataset.value === "" ? null : Number(cell.dataset.value);
  };

  const compare = (a, b) => (typeof a === "number" ? a - b : a.localeCompare(b));

  const sortBy = (column) => {
    const head = heads[column];
    const numeric = head.classList.contains("number");
    const first = numeric ? "descending" : "ascending";
    const second = numeric ? "ascending" : "descending";
    const order = head.getAttribute("aria-sort") === first ? second : first;
    const sign = order === "ascending" ? 1 : -1;
    const keyed = [...body.rows].map((row) => [keyOf(row, column), row]);
    keyed.sort(([a], [b]) => {
      if (a === null || b === null) return (a === null) - (b === null); // missing values stay at the end
      return sign * compare(a, b);
    });
    body.append(...keyed.map(([, row]) => row));
    for (const other of heads) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", order);
    status.textContent = `Sorted by ${head.textContent.trim()}, ${order}`;
  };

  document.getElementById("results-note").append(" Choose a heading to sort by it.");
  const names = heads.map((head) => head.textContent.trim());
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => sortBy(column));
  });

  // What a cell can be filtered by: each of its links by its title, or its text.
  const termsOf = (cell) => {
    const links = [...cell.querySelectorAll("a")].map((link) => link.dataset.term);
    return links.length ? links : [cell.dataset.term ?? cell.textContent.trim()];
  };

  const made = (tag, properties, ...inside) => {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...inside);
    return element;
  };

  const textual = heads.flatMap((head, column) => (head.classList.contains("number") ? [] : [column]));
  const choices = textual.map((column) => {
    const terms = new Set([...body.rows].flatMap((row) => termsOf(row.cells[column])));
    const options = [...terms].map((term) => made("option", { value: term }, term));
    const select = made("select", {}, made("option", { value: "" }, "all"), ...options);
    return { column, select };
  });

  const filter = () => {
    for (const row of body.rows) {
      row.hidden = choices.some(
        ({ column, select }) => select.value !== "" && !termsOf(row.cells[column]).includes(select.value));
    }
    const shown = [...body.rows].filter((row) => !row.hidden).length;
    count.textContent = `${shown} of ${body.rows.length} rows`;
    status.textContent = `${count.textContent} shown`;
  };

  const count = made("span", { className: "count" }, `${body.rows.length} of ${body.rows.length} rows`);
  const reset = made("button", { type: "button" }, "Show all");
  reset.addEventListener("click", () => {
    for (const { select } of choices) select.value = "";
    filter();
  });
  const fields = choices.map(({ column, select }) => {
    select.id = `filter-${column}`;
    select.addEventListener("change", filter);
    return made("div", {}, made("label", { htmlFor: select.id }, names[column]), select);
  });
  const controls = made("div", { className: "filters" }, ...fields, reset, count);
  controls.setAttribute("role", "group");
  controls.setAttribute("aria-label", "Filter the results");
  table.closest(".scroll").before(controls);
}
