package inboxpgx

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	inbox "github.com/devmappa/watermill-inbox"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

// Options of the repository.
type Options struct {
	// Table is the table's name, with or without its schema: letters, digits, underscores and one dot, at most 37
	// bytes without the schema, because PostgreSQL cuts the longer name of its index.
	// Default: "watermill_inbox".
	Table string

	// IDs says that the table is partitioned by message ids of this kind, see inboxsql.PartitionedPostgreSQLSchema:
	// other ids are refused, and messages older than its partitions. Inboxsql.Partitions, which makes and retires
	// them, runs on stdlib.OpenDBFromPool(pool) of github.com/jackc/pgx/v5/stdlib.
	// Default: a plain table.
	IDs inboxsql.IDKind

	// TxOptions are used to open each transaction. AccessMode pgx.ReadOnly is refused. Under
	// pgx.RepeatableRead and pgx.Serializable a copy that waited for the first gets an error and is a
	// duplicate on its retry.
	// Default: the isolation level of the server.
	TxOptions pgx.TxOptions
}

// Repository is an [inbox.Repository] on a pgxpool. All its methods may be called by many goroutines.
type Repository struct {
	pool      *pgxpool.Pool
	schema    inboxsql.SchemaAdapter         // has the SQL text
	named     inboxsql.Table                 // as in the options
	found     atomic.Pointer[inboxsql.Table] // with the schema in which Check found it
	txOptions pgx.TxOptions
	checked   atomic.Bool
}

var (
	_ inbox.Repository = (*Repository)(nil)
	_ inbox.Records    = (*Repository)(nil)
)

// NewRepository returns a repository on the pool. It opens no connection, so that a service may start
// before its database. The pool stays the caller's, who closes it.
func NewRepository(pool *pgxpool.Pool, options Options) (*Repository, error) {
	if pool == nil {
		return nil, errors.New("inboxpgx: pool is nil")
	}
	if options.TxOptions.AccessMode == pgx.ReadOnly {
		return nil, errors.New("inboxpgx: TxOptions.AccessMode is read only, but a claim is a write")
	}
	table, err := inboxsql.ParseTable(options.Table)
	if err != nil {
		return nil, err
	}
	r := &Repository{pool: pool, schema: inboxsql.DefaultPostgreSQLSchema{}, named: table, txOptions: options.TxOptions}
	if options.IDs != 0 {
		r.schema = inboxsql.PartitionedPostgreSQLSchema{IDs: options.IDs}
	}
	return r, nil
}

// table is the table with its schema, once Check has found it.
func (r *Repository) table() inboxsql.Table {
	if found := r.found.Load(); found != nil {
		return *found
	}
	return r.named
}

// claimTries bounds how many connections a claim may lose before it fails. After a restart of the server
// the pool may hold several that it does not know to be dead.
const claimTries = 3

// Claim implements [inbox.Repository].
func (r *Repository) Claim(ctx context.Context, key inbox.Key) (inbox.Transaction, *inbox.Record, error) {
	if checker, ok := r.schema.(inboxsql.KeyChecker); ok {
		if err := checker.CheckKey(key); err != nil {
			return nil, nil, err
		}
	}
	if !r.checked.Load() {
		if err := r.Check(ctx); err != nil {
			return nil, nil, err
		}
	}
	for try := 1; ; try++ {
		conn, err := r.pool.Acquire(ctx)
		if err != nil {
			return nil, nil, fmt.Errorf("cannot begin: %w", err)
		}
		if conn.Conn().PgConn().TxStatus() != 'I' {
			conn.Release() // which closes it
			return nil, nil, errors.New("cannot begin: a hook of the pool has begun a transaction")
		}
		t := newTransaction(ctx, r, conn, key)
		record, err := t.claim(ctx)
		if err == nil {
			t.watch()
			return t, record, nil
		}
		// With its connection the transaction is gone, and nothing of it was committed: it is safe to begin
		// again, also when the statement may have reached the server.
		lost := conn.Conn().IsClosed()
		_ = t.Rollback() // the claim's error says more
		if !lost || ctx.Err() != nil || try == claimTries {
			return nil, nil, r.explain(ctx, t.keyParams(), err)
		}
	}
}

// explain lets the adapter say more about a claim's error. The claim's connection has been given back.
func (r *Repository) explain(ctx context.Context, params inboxsql.KeyParams, err error) error {
	explainer, ok := r.schema.(inboxsql.ClaimExplainer)
	if !ok {
		return err
	}
	return explainer.ExplainClaim(params, err, func(query inboxsql.Query) (texts []string, err error) {
		var text string
		err = r.read(ctx, query, []any{&text}, func() { texts = append(texts, text) })
		return texts, err
	})
}

// MarkSent implements [inbox.Repository].
func (r *Repository) MarkSent(ctx context.Context, records []inbox.Found) error {
	if len(records) == 0 {
		return nil
	}
	query := r.schema.MarkSentQuery(inboxsql.MarkSentParams{Table: r.table(), Records: sorted(records)})
	if _, err := r.pool.Exec(ctx, query.Query); err != nil {
		return fmt.Errorf("inboxpgx: cannot mark stored messages as sent: %w", err)
	}
	return nil
}

func sorted(records []inbox.Found) []inbox.Found {
	return slices.SortedFunc(slices.Values(records), func(a, b inbox.Found) int {
		return cmp.Or(strings.Compare(a.Key.Consumer, b.Key.Consumer), strings.Compare(a.Key.MessageID, b.Key.MessageID))
	})
}

// read runs a query on the pool and calls the function for each row, which it has scanned.
func (r *Repository) read(ctx context.Context, query inboxsql.Query, scans []any, each func()) error {
	return r.pool.AcquireFunc(ctx, func(conn *pgxpool.Conn) error {
		return read(ctx, conn.Conn(), query, scans, each)
	})
}

// read takes one round trip and leaves nothing on the server or in the caches, whatever mode the pool has.
// Results are binary: as text, bytes depend on the server's bytea_output.
func read(ctx context.Context, conn *pgx.Conn, query inboxsql.Query, scans []any, each func()) error {
	result := conn.PgConn().ExecParams(ctx, query.Query, nil, nil, nil, []int16{pgx.BinaryFormatCode})
	_, err := pgx.ForEachRow(pgx.RowsFromResultReader(conn.TypeMap(), result), scans, func() error { each(); return nil })
	return err
}
