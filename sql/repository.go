package inboxsql

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"

	inbox "github.com/devmappa/watermill-inbox"
)

// Options of the repository.
type Options struct {
	// SchemaAdapter is DefaultPostgreSQLSchema, PartitionedPostgreSQLSchema, DefaultSQLiteSchema or one's own.
	// Required.
	SchemaAdapter SchemaAdapter

	// Table is the table's name, with or without its schema: letters, digits, underscores and one dot, at most 37
	// bytes without the schema, because PostgreSQL cuts the longer name of its index.
	// Default: "watermill_inbox".
	Table string

	// TxOptions are used to open each transaction. ReadOnly is refused. Under REPEATABLE READ and
	// SERIALIZABLE a copy that waited for the first gets an error and is a duplicate on its retry.
	// Default: nil, the isolation level of the server.
	TxOptions *sql.TxOptions
}

// Repository is an [inbox.Repository] on database/sql. All its methods may be called by many goroutines.
type Repository struct {
	db        *sql.DB
	schema    SchemaAdapter
	named     Table                 // as in the options
	found     atomic.Pointer[Table] // with the schema in which Check found it
	txOptions *sql.TxOptions
	fused     beginClaimer // nil: begin and claim are two round trips
	checked   atomic.Bool
}

// beginClaimer is a SchemaAdapter whose claim can begin its transaction.
type beginClaimer interface {
	BeginClaimQuery(params KeyParams) Query
}

var (
	_ inbox.Repository = (*Repository)(nil)
	_ inbox.Records    = (*Repository)(nil)
)

// NewRepository returns a repository on the pool. It opens no connection, so that a service may start
// before its database. The pool stays the caller's, who closes it.
func NewRepository(db *sql.DB, options Options) (*Repository, error) {
	if db == nil {
		return nil, errors.New("inboxsql: db is nil")
	}
	if options.SchemaAdapter == nil {
		return nil, errors.New("inboxsql: SchemaAdapter is nil")
	}
	if options.TxOptions != nil && options.TxOptions.ReadOnly {
		return nil, errors.New("inboxsql: TxOptions.ReadOnly is set, but a claim is a write")
	}
	table, err := ParseTable(options.Table)
	if err != nil {
		return nil, err
	}
	r := &Repository{db: db, schema: options.SchemaAdapter, named: table, txOptions: options.TxOptions}
	if _, ok := db.Driver().(fusedDriver); ok {
		r.fused, _ = options.SchemaAdapter.(beginClaimer)
	}
	return r, nil
}

// table is the table with its schema, once Check has found it.
func (r *Repository) table() Table {
	if found := r.found.Load(); found != nil {
		return *found
	}
	return r.named
}

// Claim implements [inbox.Repository].
func (r *Repository) Claim(ctx context.Context, key inbox.Key) (inbox.Transaction, *inbox.Record, error) {
	if checker, ok := r.schema.(KeyChecker); ok {
		if err := checker.CheckKey(key); err != nil {
			return nil, nil, err
		}
	}
	if !r.checked.Load() {
		if err := r.Check(ctx); err != nil {
			return nil, nil, err
		}
	}
	t := &transaction{repository: r, key: key}
	inserted, err := t.beginAndClaim(ctx)
	if err != nil {
		return nil, nil, r.explain(ctx, t.keyParams(), err)
	}
	record, err := t.decide(ctx, inserted)
	if err != nil {
		_ = t.Rollback() // the error says more
		return nil, nil, r.explain(ctx, t.keyParams(), err)
	}
	return t, record, nil
}

// explain lets the adapter say more about a claim's error. The claim's connection has been given back.
func (r *Repository) explain(ctx context.Context, params KeyParams, err error) error {
	explainer, ok := r.schema.(ClaimExplainer)
	if !ok {
		return err
	}
	return explainer.ExplainClaim(params, err, func(query Query) ([]string, error) { return r.texts(ctx, query) })
}

// MarkSent implements [inbox.Repository].
func (r *Repository) MarkSent(ctx context.Context, records []inbox.Found) error {
	if len(records) == 0 {
		return nil
	}
	query := r.schema.MarkSentQuery(MarkSentParams{Table: r.table(), Records: sorted(records)})
	if _, err := r.db.ExecContext(ctx, query.Query, query.Args...); err != nil {
		return fmt.Errorf("inboxsql: cannot mark stored messages as sent: %w", err)
	}
	return nil
}

func sorted(records []inbox.Found) []inbox.Found {
	return slices.SortedFunc(slices.Values(records), func(a, b inbox.Found) int {
		return cmp.Or(strings.Compare(a.Key.Consumer, b.Key.Consumer), strings.Compare(a.Key.MessageID, b.Key.MessageID))
	})
}
