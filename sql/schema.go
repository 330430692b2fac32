package inboxsql

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"strings"
)

// Schema holds the schema files, as schema/<database>/NNN_*.sql, for users who run migrations with a tool
// of their own. They are numbered and additive: an instance works with the files of its version and with
// those of the next one.
//
//go:embed schema
var Schema embed.FS

const defaultIndex = `"` + defaultTable + indexSuffix + `"`

// schemaQueries returns a query per schema file, with the table and its index renamed.
func schemaQueries(database string, rename *strings.Replacer) []Query {
	files, err := fs.Glob(Schema, "schema/"+database+"/*.sql")
	if err != nil || len(files) == 0 {
		panic("inboxsql: no schema files for " + database) // they are compiled in
	}
	queries := make([]Query, len(files))
	for i, file := range files {
		text, err := fs.ReadFile(Schema, file)
		if err != nil {
			panic("inboxsql: " + err.Error())
		}
		queries[i].Query = rename.Replace(string(text))
	}
	return queries
}

// InitializeSchema creates what is missing of the table and its index, and then checks it, see
// [Repository.Check]. Many instances may call it at once. When nothing is missing it only reads, so that
// a role without the right to create may call it.
func (r *Repository) InitializeSchema(ctx context.Context) error {
	if r.Check(ctx) == nil {
		return nil
	}
	if err := r.initializeSchema(ctx); err != nil {
		return fmt.Errorf("inboxsql: cannot initialize the schema: %w", err)
	}
	return r.Check(ctx)
}

func (r *Repository) initializeSchema(ctx context.Context) error {
	tx, err := r.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	for _, query := range r.schema.SchemaInitializingQueries(SchemaInitializingQueriesParams{Table: r.named}) {
		if _, err := tx.ExecContext(ctx, query.Query, query.Args...); err != nil {
			return err
		}
	}
	return tx.Commit()
}

// CheckError tells why the table or the server cannot be used. Nothing is claimed and nothing is
// acknowledged until the faults are mended.
type CheckError struct {
	Table    string
	Problems []string
}

// Error lists the problems.
func (e *CheckError) Error() string {
	return fmt.Sprintf("inboxsql: table %s cannot be used as an inbox: %s", e.Table, strings.Join(e.Problems, "; "))
}

// Check verifies that the inbox can be trusted: the server is writable; both ends speak UTF-8; the table
// is there with all its columns, and survives a crash; the names are compared byte by byte; there is a
// unique key on exactly the key's columns, and nothing more. It returns a [*CheckError] that names all
// faults, or the error of the query.
//
// It runs by itself before the first claim until it has succeeded once. It is a query on the catalog, cheap
// enough for a readiness probe. A table named without a schema is looked up in the search path once; what
// was found then is used for ever.
func (r *Repository) Check(ctx context.Context) error {
	if err := r.find(ctx); err != nil {
		return fmt.Errorf("inboxsql: cannot check the schema: %w", err)
	}
	problems, err := r.texts(ctx, r.schema.CheckQuery(CheckParams{Table: r.table()}))
	if err != nil {
		return fmt.Errorf("inboxsql: cannot check the schema: %w", err)
	}
	if len(problems) > 0 {
		return &CheckError{Table: r.table().Quoted(), Problems: problems}
	}
	r.checked.Store(true)
	return nil
}

// texts runs a query on the pool that selects one column of texts.
func (r *Repository) texts(ctx context.Context, query Query) ([]string, error) {
	var texts []string
	err := r.rows(ctx, query, func(rows *sql.Rows) error {
		var text string
		err := rows.Scan(&text)
		texts = append(texts, text)
		return err
	})
	return texts, err
}

// find looks once in which schema the table is.
func (r *Repository) find(ctx context.Context) error {
	query := r.schema.SchemaQuery(CheckParams{Table: r.named})
	if query.Query == "" || r.named.Schema() != "" || r.found.Load() != nil {
		return nil
	}
	var schema string
	err := r.db.QueryRowContext(ctx, query.Query, query.Args...).Scan(&schema)
	if errors.Is(err, sql.ErrNoRows) {
		return nil // CheckQuery says so
	}
	if err != nil {
		return err
	}
	table := r.named.In(schema)
	r.found.Store(&table)
	return nil
}
