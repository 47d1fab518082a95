// The search of Sphinx reads this before its own script.

// A page that was opened as a file may not read other pages, so there the results have no excerpts.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;

// The weights are those of Sphinx, except that the glossary comes first, and design notes and lists of changes come last.
var Scorer = {
  score: ([page, , , , score]) =>
    /^(design\/|changes$|contributing$)/.test(page) ? score - 10 : page === "glossary" ? score + 3 : score,
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
