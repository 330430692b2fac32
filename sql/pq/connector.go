// Package inboxpq lets the inbox on lib/pq begin and claim in one round trip.
package inboxpq

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"

	"github.com/lib/pq"

	"github.com/devmappa/watermill-inbox/internal/sqlpool"
)

// NewConnector wraps lib/pq's connector, so that a transaction of the inbox begins and claims in one round
// trip instead of two: the inbox then costs no round trip more than the handler's own transaction.
//
//	connector, err := pq.NewConnector(url)
//	// ...
//	fused, err := inboxpq.NewConnector(connector)
//	// ...
//	db := sql.OpenDB(fused)
//
// An inboxsql.Repository on such a pool notices by itself. All else on the pool goes to lib/pq unchanged; the
// handler gets an ordinary *sql.Tx. Statements in any transaction end with the context of BeginTx, as with
// lib/pq, and with their own.
//
// It returns an error for another driver's connector. A connector of lib/pq that was given a notice or
// notification handler can be wrapped; functions of lib/pq that take a driver.Conn need the one inside.
func NewConnector(connector driver.Connector) (driver.Connector, error) {
	if connector == nil {
		return nil, errors.New("inboxpq: connector is nil")
	}
	if _, ok := connector.Driver().(*pq.Driver); !ok {
		return nil, fmt.Errorf("inboxpq: the connector is not lib/pq's, its driver is %T", connector.Driver())
	}
	return &fusedConnector{connector}, nil
}

type fusedConnector struct{ driver.Connector }

// fusedDriver tells the repository what the pool can do.
type fusedDriver struct{ driver.Driver }

var _ sqlpool.FusingDriver = fusedDriver{}

// Fuses implements [sqlpool.FusingDriver].
func (fusedDriver) Fuses() {}

func (c *fusedConnector) Driver() driver.Driver { return fusedDriver{c.Connector.Driver()} }

func (c *fusedConnector) Connect(ctx context.Context) (driver.Conn, error) {
	inner, err := c.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	full, ok := inner.(pqConn)
	if !ok {
		_ = inner.Close()
		return nil, fmt.Errorf("inboxpq: a connection of this version of lib/pq lacks an interface: %T", inner)
	}
	return &fusedConn{pqConn: full}, nil
}

// pqConn is what a connection of lib/pq can do. It is its own transaction.
type pqConn interface {
	driver.Conn
	driver.ConnBeginTx
	driver.ConnPrepareContext
	driver.ExecerContext
	driver.QueryerContext
	driver.NamedValueChecker
	driver.Pinger
	driver.SessionResetter
	driver.Validator
	driver.Tx
}

type fusedConn struct {
	pqConn
	strangers bool // in the middle of a transaction that is not ours
	idle      bool // lib/pq has ended a transaction of ours, and nothing else has happened since
	tx        *fusedTx
}

// BeginTx begins with the statement that it finds in the context.
func (c *fusedConn) BeginTx(ctx context.Context, options driver.TxOptions) (driver.Tx, error) {
	fused, ok := sqlpool.FusedFrom(ctx)
	if !ok {
		return c.beginForOthers(ctx, options)
	}
	begin, err := beginStatement(options)
	if err != nil {
		return nil, err
	}
	fused.Affected = 0 // database/sql tries again after ErrBadConn
	statement := fused.Guarded
	if c.idle {
		statement = fused.Plain
	}
	c.idle = false
	result, err := c.pqConn.ExecContext(ctx, begin+"; "+statement, nil)
	if err != nil {
		return nil, c.failedBegin(err)
	}
	if fused.Affected, err = result.RowsAffected(); err != nil {
		return nil, c.failedBegin(err)
	}
	c.tx = &fusedTx{conn: c, ctx: ctx, fused: fused}
	return c.tx, nil
}

// Begin is for who uses the connection behind database/sql's back.
func (c *fusedConn) Begin() (driver.Tx, error) {
	return c.BeginTx(context.Background(), driver.TxOptions{})
}

// beginForOthers begins a transaction without a claim. Lib/pq would keep what watches its context after its end,
// and a later transaction that began with a claim would end it once more, which panics in lib/pq or takes the old
// context's end for its own. So here too the context is ours to watch.
func (c *fusedConn) beginForOthers(ctx context.Context, options driver.TxOptions) (driver.Tx, error) {
	c.idle = false
	if _, err := c.pqConn.BeginTx(context.WithoutCancel(ctx), options); err != nil {
		return nil, err
	}
	c.tx = &fusedTx{conn: c, ctx: ctx}
	return c.tx, nil
}

// failedBegin leaves the connection without a transaction, or marks it for the pool to close.
func (c *fusedConn) failedBegin(err error) error {
	var serverErr *pq.Error
	if errors.As(err, &serverErr) && serverErr.SQLState() == stateInTransaction {
		c.strangers = true
		return fmt.Errorf("inboxpq: somebody has left the connection in a transaction: %w", err)
	}
	if rollbackErr := c.pqConn.Rollback(); rollbackErr != nil {
		c.strangers = true
	}
	return err
}

// stateInTransaction is what the claim fails with in a transaction that is older than itself, see
// dialect.PostgreSQL.BeginClaim: division by zero.
const stateInTransaction = "22012"

// IsValid and ResetSession keep a stranger's transaction out of the pool.
func (c *fusedConn) IsValid() bool { return !c.strangers && c.pqConn.IsValid() }

func (c *fusedConn) ResetSession(ctx context.Context) error {
	if c.strangers {
		return driver.ErrBadConn
	}
	return c.pqConn.ResetSession(ctx)
}

func (c *fusedConn) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	ctx, release := c.bind(ctx)
	defer release()
	return c.pqConn.ExecContext(ctx, query, args)
}

func (c *fusedConn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	ctx, release := c.bind(ctx)
	rows, err := c.pqConn.QueryContext(ctx, query, args)
	return c.releaseLater(release, rows, err)
}

func (c *fusedConn) Prepare(query string) (driver.Stmt, error) {
	return c.PrepareContext(context.Background(), query)
}

func (c *fusedConn) PrepareContext(ctx context.Context, query string) (driver.Stmt, error) {
	ctx, release := c.bind(ctx)
	defer release()
	inner, err := c.pqConn.PrepareContext(ctx, query)
	if err != nil {
		return nil, err
	}
	full, ok := inner.(pqStmt)
	if !ok {
		return inner, nil // COPY, which takes no contexts
	}
	return &fusedStmt{pqStmt: full, conn: c}, nil
}

// bind returns a context that ends with the statement's and with the transaction's. Lib/pq watches the
// context given to its own BeginTx; ours has not gone there. Every statement passes through here.
func (c *fusedConn) bind(ctx context.Context) (bound context.Context, release func()) {
	c.idle = false
	if c.tx == nil {
		return ctx, func() {}
	}
	if ctx.Done() == nil {
		return c.tx.ctx, func() {}
	}
	bound, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(c.tx.ctx, cancel)
	return bound, func() {
		stop()
		cancel()
	}
}

// releaseLater keeps the context of a query for its rows, which database/sql closes before it ends the transaction.
func (c *fusedConn) releaseLater(release func(), rows driver.Rows, err error) (driver.Rows, error) {
	if err != nil || c.tx == nil {
		release()
		return rows, err
	}
	full, ok := rows.(pqRows)
	if !ok {
		c.tx.releases = append(c.tx.releases, release)
		return rows, nil
	}
	return &fusedRows{full, release}, nil
}

// pqRows is what rows of lib/pq can do.
type pqRows interface {
	driver.RowsNextResultSet
	driver.RowsColumnTypeScanType
	driver.RowsColumnTypeDatabaseTypeName
	driver.RowsColumnTypeLength
	driver.RowsColumnTypePrecisionScale
}

type fusedRows struct {
	pqRows
	release func()
}

func (r *fusedRows) Close() error {
	defer r.release()
	return r.pqRows.Close()
}

type pqStmt interface {
	driver.Stmt
	driver.StmtExecContext
	driver.StmtQueryContext
}

type fusedStmt struct {
	pqStmt
	conn *fusedConn
}

func (s *fusedStmt) ExecContext(ctx context.Context, args []driver.NamedValue) (driver.Result, error) {
	ctx, release := s.conn.bind(ctx)
	defer release()
	return s.pqStmt.ExecContext(ctx, args)
}

func (s *fusedStmt) QueryContext(ctx context.Context, args []driver.NamedValue) (driver.Rows, error) {
	ctx, release := s.conn.bind(ctx)
	rows, err := s.pqStmt.QueryContext(ctx, args)
	return s.conn.releaseLater(release, rows, err)
}

// fusedTx is an open transaction.
type fusedTx struct {
	conn     *fusedConn
	ctx      context.Context // given to BeginTx
	fused    *sqlpool.Fused  // nil: somebody else's
	releases []func()
}

// Commit proves and commits in one message. When the proof fails the server goes no further.
func (t *fusedTx) Commit() error {
	if t.fused == nil || t.fused.Proof == "" {
		return t.end(t.conn.pqConn.Commit)
	}
	return t.end(func() error {
		_, err := t.conn.pqConn.ExecContext(context.Background(), t.fused.Proof+"; COMMIT", nil)
		if err != nil {
			// Not lib/pq's Rollback, which gives the connection up when there is nothing to roll back.
			_, _ = t.conn.pqConn.ExecContext(context.Background(), "ROLLBACK", nil)
		}
		return err
	})
}

func (t *fusedTx) Rollback() error { return t.end(t.conn.pqConn.Rollback) }

func (t *fusedTx) end(how func() error) error {
	t.conn.tx = nil
	for _, release := range t.releases {
		release()
	}
	err := how()
	t.conn.idle = err == nil
	return err
}

// beginStatement is lib/pq's.
func beginStatement(options driver.TxOptions) (string, error) {
	begin := "BEGIN"
	switch isolation := sql.IsolationLevel(options.Isolation); isolation {
	case sql.LevelDefault:
	case sql.LevelReadUncommitted, sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable:
		begin += " ISOLATION LEVEL " + isolation.String()
	default:
		return "", fmt.Errorf("inboxpq: isolation level not supported: %s", isolation)
	}
	if options.ReadOnly {
		return "", errors.New("inboxpq: a claim is a write")
	}
	return begin + " READ WRITE", nil
}
