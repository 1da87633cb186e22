"use strict";
// Makes the results sortable. Without this script the table is simply a table, so the buttons are made here.
for (const table of document.querySelectorAll("table[data-sortable]")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const status = document.getElementById("sort-status");

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
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => sortBy(column));
  });
}
