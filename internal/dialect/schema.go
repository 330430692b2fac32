package dialect

import (
	"embed"
	"io/fs"
	"strings"
)

// Files holds the schema files, as schema/<database>/NNN_*.sql. They are numbered and additive: an instance works
// with the files of its version and with those of the next one.
//
//go:embed schema
var Files embed.FS

const defaultIndex = `"` + defaultTable + indexSuffix + `"`

// schemaQueries returns a query per schema file, with the table and its index renamed.
func schemaQueries(database string, rename *strings.Replacer) []Query {
	files, err := fs.Glob(Files, "schema/"+database+"/*.sql")
	if err != nil || len(files) == 0 {
		panic("inbox: no schema files for " + database) // they are compiled in
	}
	queries := make([]Query, len(files))
	for i, file := range files {
		text, err := fs.ReadFile(Files, file)
		if err != nil {
			panic("inbox: " + err.Error())
		}
		queries[i].Text = rename.Replace(string(text))
	}
	return queries
}
