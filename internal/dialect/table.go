package dialect

import (
	"fmt"
	"regexp"
	"strings"
)

const (
	defaultTable = "watermill_inbox"
	indexSuffix  = "_consumer_processed_at_idx"
	unsentSuffix = "_unsent"
)

// identifier leaves out what would need quoting, so that the same name works unquoted in a migration.
var identifier = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)

// maxIdentifierBytes is PostgreSQL's limit; it cuts longer names without an error.
const maxIdentifierBytes = 63

// Table is a validated table name.
type Table struct {
	schema, name string
}

// ParseTable accepts "table" and "schema.table"; an empty name is the default, "watermill_inbox".
func ParseTable(s string) (Table, error) {
	if s == "" {
		s = defaultTable
	}
	t := Table{name: s}
	if schema, name, qualified := strings.Cut(s, "."); qualified {
		t = Table{schema: schema, name: name}
		if !identifier.MatchString(schema) || len(schema) > maxIdentifierBytes {
			return Table{}, fmt.Errorf("inbox: invalid schema in table name %q", s)
		}
	}
	if !identifier.MatchString(t.name) {
		return Table{}, fmt.Errorf("inbox: invalid table name %q: letters, digits and underscores are allowed, and a schema before a dot", s)
	}
	if limit := maxIdentifierBytes - len(indexSuffix); len(t.name) > limit {
		return Table{}, fmt.Errorf("inbox: table name %q is longer than %d bytes", s, limit)
	}
	return t, nil
}

// Name is the name without its schema.
func (t Table) Name() string { return t.name }

// Schema is the schema's name; empty when the table was named without one.
func (t Table) Schema() string { return t.schema }

// In is the table with the schema in which it was found.
func (t Table) In(schema string) Table { return Table{schema: schema, name: t.name} }

// Unsent is the table of the messages that are not known to be sent.
func (t Table) Unsent() Table { return t.Named(t.name + unsentSuffix) }

// Named is another table in the same schema.
func (t Table) Named(name string) Table { return Table{schema: t.schema, name: name} }

// Quoted is the name to write into SQL text.
func (t Table) Quoted() string {
	if t.schema == "" {
		return Identifier(t.name)
	}
	return Identifier(t.schema) + "." + Identifier(t.name)
}

// String is the name for people, and for literals that PostgreSQL reads as a name.
func (t Table) String() string {
	if t.schema == "" {
		return plainIdentifier(t.name)
	}
	return plainIdentifier(t.schema) + "." + plainIdentifier(t.name)
}
