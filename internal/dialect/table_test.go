package dialect_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/devmappa/watermill-inbox/internal/dialect"
)

// FuzzParseTable: a name is refused, or it means the same to every database, quoted or not, whole and not cut.
func FuzzParseTable(f *testing.F) {
	for _, name := range []string{"", "inbox", "shop.inbox", "a.b.c", ".", "a.", ".a", "1", "_", "A1_", "ä", "a\n", "a\x00", "\xff", " a", "a b",
		`a"b`, `"a"`, `a";DROP TABLE b;--`, "select", "watermill_inbox", "shop.watermill_inbox", "watermill_inbox_consumer_processed_at_idx",
		"pg_class", "temp.inbox",
		strings.Repeat("x", 46), strings.Repeat("x", 47), strings.Repeat("s", 63) + ".x", strings.Repeat("s", 64) + ".x"} {
		f.Add(name)
	}
	valid := func(identifier string, limit int) bool {
		const letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_"
		return identifier != "" && len(identifier) <= limit && strings.ContainsRune(letters, rune(identifier[0])) &&
			strings.Trim(identifier, letters+"0123456789") == ""
	}
	f.Fuzz(func(t *testing.T, text string) {
		parts := strings.Split(text, ".")
		if text == "" {
			parts = []string{"watermill_inbox"}
		}
		name, schema := parts[len(parts)-1], ""
		ok := len(parts) <= 2 && valid(name, 63-len("_consumer_processed_at_idx"))
		quoted := `"` + name + `"`
		if len(parts) == 2 {
			schema = parts[0]
			ok = ok && valid(schema, 63)
			quoted = `"` + schema + `".` + quoted
		}

		table, err := dialect.ParseTable(text)
		if ok != (err == nil) {
			t.Fatalf("%q: %v", text, err)
		}
		if !ok {
			if table != (dialect.Table{}) || !strings.Contains(err.Error(), fmt.Sprintf("%q", text)) {
				t.Fatalf("%q: %+v, %v", text, table, err)
			}
			return
		}
		if table.Name() != name || table.Schema() != schema || table.Quoted() != quoted {
			t.Fatalf("%q became %q and %q, quoted %s", text, table.Schema(), table.Name(), table.Quoted())
		}
		if again, err := dialect.ParseTable(strings.TrimPrefix(schema+"."+name, ".")); err != nil || again != table {
			t.Fatalf("%q became %+v, %v", text, again, err)
		}

		// The schema files' own names are all replaced, and by whole names.
		for database, c := range map[string]struct {
			dialect              dialect.Dialect
			createIndex, onTable string
		}{
			"PostgreSQL": {dialect.PostgreSQL{}, `"` + name + `_consumer_processed_at_idx"`, quoted},
			"SQLite":     {dialect.SQLite{}, strings.TrimSuffix(quoted, `"`) + `_consumer_processed_at_idx"`, `"` + name + `"`},
		} {
			var queries strings.Builder
			for _, query := range c.dialect.Schema(table) {
				queries.WriteString(query.Text)
			}
			for _, want := range []string{
				"\nCREATE TABLE IF NOT EXISTS " + quoted + " (\n",
				"\nCREATE INDEX IF NOT EXISTS " + c.createIndex + " ON " + c.onTable + ` ("consumer", "processed_at");`,
			} {
				if strings.Count(queries.String(), want) != 1 {
					t.Fatalf("%s: not once %s in %s", database, want, queries.String())
				}
			}
			if name != "watermill_inbox" && strings.Contains(queries.String(), `"watermill_inbox"`) {
				t.Fatalf("%s: %s", database, queries.String())
			}
		}
	})
}
