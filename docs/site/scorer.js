// Scores of search results. Guides come before decision records and results of measurements, which have the same words.
var Scorer = {
  score: ([page, , , , score]) =>
    /^docs\/[^/]+$/.test(page) ? score : score - 20,
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
