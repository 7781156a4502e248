// The behaviour of all pages. Values of a run are only ever set as text, never as markup.
"use strict";
