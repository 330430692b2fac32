package inboxpgx

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

// InitializeSchema creates what is missing of the table and its index, and then checks it, see
// [Repository.Check]. Many instances may call it at once. When nothing is missing it only reads, so that
// a role without the right to create may call it.
func (r *Repository) InitializeSchema(ctx context.Context) error {
	if r.Check(ctx) == nil {
		return nil
	}
	err := pgx.BeginFunc(ctx, r.pool, func(tx pgx.Tx) error {
		for _, query := range r.schema.SchemaInitializingQueries(inboxsql.SchemaInitializingQueriesParams{Table: r.table()}) {
			if _, err := tx.Exec(ctx, query.Query); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("inboxpgx: cannot initialize the schema: %w", err)
	}
	return r.Check(ctx)
}

// Check verifies that the inbox can be trusted, as inboxsql.Repository.Check does. It returns an
// *inboxsql.CheckError that names all faults, or the error of the query.
//
// It runs by itself before the first claim until it has succeeded once. It is a query on the catalog, cheap
// enough for a readiness probe. A table named without a schema is looked up in the search path once; what
// was found then is used for ever.
func (r *Repository) Check(ctx context.Context) error {
	if err := r.find(ctx); err != nil {
		return fmt.Errorf("inboxpgx: cannot check the schema: %w", err)
	}
	found := &inboxsql.CheckError{Table: r.table().Quoted()}
	var problem string
	err := r.read(ctx, r.schema.CheckQuery(inboxsql.CheckParams{Table: r.table()}), []any{&problem}, func() {
		found.Problems = append(found.Problems, problem)
	})
	if err != nil {
		return fmt.Errorf("inboxpgx: cannot check the schema: %w", err)
	}
	if len(found.Problems) > 0 {
		return found
	}
	r.checked.Store(true)
	return nil
}

// find looks once in which schema the table is.
func (r *Repository) find(ctx context.Context) error {
	if r.named.Schema() != "" || r.found.Load() != nil {
		return nil
	}
	var name string
	return r.read(ctx, r.schema.SchemaQuery(inboxsql.CheckParams{Table: r.named}), []any{&name}, func() {
		table := r.named.In(name)
		r.found.Store(&table)
	})
}
