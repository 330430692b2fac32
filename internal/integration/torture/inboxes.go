//go:build unix

package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/inboxtest"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

// ours is the inbox under test. All others are wrong on purpose, as people write them by hand: a checker
// that lets one of them pass proves nothing.
const ours = "watermill-inbox"

const (
	checkThenInsert   = "check-then-insert"
	claimBeforeEffect = "claim-committed-before-the-effect"
	claimAfterEffect  = "claim-after-the-effect"
	keyWithout        = "key-without-the-consumer"
	notStored         = "produced-messages-not-stored"
)

var wrongInboxes = []string{checkThenInsert, claimBeforeEffect, claimAfterEffect, keyWithout, notStored}

// inboxUnderTest is what a worker puts into its router.
type inboxUnderTest struct {
	middleware message.HandlerMiddleware
	close      func(context.Context) error
}

func newInbox(name string, s store, r *reaper, logger watermill.LoggerAdapter) (inboxUnderTest, error) {
	options := inbox.Options{Logger: logger}
	repository := inbox.Repository(inboxtest.NewFaultRepository(s.repository(), r.fault))
	switch name {
	case ours:
	case keyWithout:
		options.Consumer = func(string) string { return "everybody" }
	case notStored:
		repository = forgetful{repository}
	default:
		plain, ok := s.(*sqlStore)
		if !ok {
			return inboxUnderTest{}, fmt.Errorf("%s needs database/sql", name)
		}
		wrong := handWritten{db: plain.db, reaper: r}
		flow, ok := map[string]func(context.Context, string, string, func(*sql.Tx) error) error{
			checkThenInsert:   wrong.checkThenInsert,
			claimBeforeEffect: wrong.claimBeforeEffect,
			claimAfterEffect:  wrong.claimAfterEffect,
		}[name]
		if !ok {
			return inboxUnderTest{}, fmt.Errorf("there is no inbox %q", name)
		}
		return inboxUnderTest{middleware: middlewareOf(flow), close: func(context.Context) error { return nil }}, nil
	}
	once, err := inbox.NewMiddleware(repository, options)
	if err != nil {
		return inboxUnderTest{}, err
	}
	return inboxUnderTest{middleware: once.Middleware, close: once.Close}, nil
}

// forgetful commits without the produced messages: a crash before the publish loses them.
type forgetful struct{ inbox.Repository }

func (f forgetful) Claim(ctx context.Context, params inbox.ClaimParams) (inbox.Transaction, *inbox.Record, error) {
	transaction, record, err := f.Repository.Claim(ctx, params)
	if err != nil {
		return nil, nil, err
	}
	return forgetfulTransaction{transaction}, record, nil
}

type forgetfulTransaction struct{ inbox.Transaction }

func (t forgetfulTransaction) Unwrap() inbox.Transaction { return t.Transaction }

func (t forgetfulTransaction) Store(context.Context, []byte) (time.Time, error) {
	return time.Now(), nil
}

// handWritten has the flows that go wrong. Its records are in the inbox's table.
type handWritten struct {
	db     *sql.DB
	reaper *reaper
}

var errDuplicate = errors.New("duplicate")

// checkThenInsert looks first: two copies at once both see nothing.
func (h handWritten) checkThenInsert(ctx context.Context, consumer, id string, effect func(*sql.Tx) error) error {
	return h.inTransaction(ctx, func(tx *sql.Tx) error {
		if err := refuseKnown(ctx, tx, consumer, id); err != nil {
			return err
		}
		if err := effect(tx); err != nil {
			return err
		}
		_, err := claim(ctx, tx, consumer, id)
		return err
	})
}

// claimBeforeEffect commits the claim first: a crash after it loses the effect.
func (h handWritten) claimBeforeEffect(ctx context.Context, consumer, id string, effect func(*sql.Tx) error) error {
	claimed, err := claim(ctx, h.db, consumer, id)
	if err != nil {
		return err
	}
	if !claimed {
		return errDuplicate
	}
	h.reaper.pass(string(inboxtest.AfterClaim))
	return h.inTransaction(ctx, effect)
}

// claimAfterEffect commits the effect first: a crash after it, or a copy at once, doubles it.
func (h handWritten) claimAfterEffect(ctx context.Context, consumer, id string, effect func(*sql.Tx) error) error {
	if err := refuseKnown(ctx, h.db, consumer, id); err != nil {
		return err
	}
	if err := h.inTransaction(ctx, effect); err != nil {
		return err
	}
	h.reaper.pass(string(inboxtest.BeforeClaim))
	_, err := claim(ctx, h.db, consumer, id)
	return err
}

func (h handWritten) inTransaction(ctx context.Context, do func(*sql.Tx) error) error {
	tx, err := h.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	if err := do(tx); err != nil {
		return err
	}
	h.reaper.pass(string(inboxtest.BeforeCommit))
	if err := tx.Commit(); err != nil {
		return err
	}
	h.reaper.pass(string(inboxtest.AfterCommit))
	return nil
}

type querier interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

func refuseKnown(ctx context.Context, q querier, consumer, id string) error {
	var count int
	err := q.QueryRowContext(ctx, `SELECT count(*) FROM watermill_inbox WHERE consumer = $1 AND message_id = $2`, consumer, id).Scan(&count)
	if err == nil && count > 0 {
		return errDuplicate
	}
	return err
}

func claim(ctx context.Context, q querier, consumer, id string) (bool, error) {
	result, err := q.ExecContext(ctx,
		`INSERT INTO watermill_inbox (consumer, message_id) VALUES ($1, $2) ON CONFLICT DO NOTHING`, consumer, id)
	if err != nil {
		return false, err
	}
	inserted, err := result.RowsAffected()
	return inserted == 1, err
}

// middlewareOf puts a flow around a handler.
func middlewareOf(flow func(ctx context.Context, consumer, id string, effect func(*sql.Tx) error) error) message.HandlerMiddleware {
	return func(h message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) (produced []*message.Message, err error) {
			ctx := msg.Context()
			defer msg.SetContext(ctx)
			err = flow(ctx, message.HandlerNameFromCtx(ctx), msg.UUID, func(tx *sql.Tx) error {
				msg.SetContext(inboxsql.ContextWithTx(ctx, tx))
				produced, err = h(msg)
				return err
			})
			if errors.Is(err, errDuplicate) {
				say("inbox", "duplicate")
				return nil, nil
			}
			if err == nil {
				say("inbox", "processed")
			}
			return produced, err
		}
	}
}
