package sql_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/inboxtest"
	"github.com/devmappa/watermill-inbox/internal/dialect"
	"github.com/devmappa/watermill-inbox/internal/integration/testdb"
	"github.com/devmappa/watermill-inbox/partitions"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

func TestPartitionedRepository(t *testing.T) {
	t.Parallel()
	for _, driver := range []string{"postgres", "fused", "pgx"} {
		t.Run(driver, func(t *testing.T) {
			t.Parallel()
			inboxtest.TestRepository(t, inboxtest.RepositoryFeatures{FailedStatementBreaksTransaction: true}, func(t *testing.T) inboxtest.RepositorySubject {
				db := testdb.PostgreSQL(t, driver)
				db.SetMaxOpenConns(8)
				db.Partitioned(t, partitions.Options{})
				return testdb.UUIDs(db.Subject(t, inboxsql.Options{}))
			})
		})
	}
}

func today() time.Time { return time.Now().UTC().Truncate(24 * time.Hour) }

// partitionFrom is the name of the partition that begins there.
func partitionFrom(at time.Time) string { return "watermill_inbox_p" + at.Format("20060102t150405") }

func daysAgo(n int) time.Time { return today().AddDate(0, 0, -n) }

// makePartition makes a partition from one day to another, as an administrator would.
func makePartition(t testing.TB, db *testdb.Database, name string, from, to time.Time) {
	t.Helper()
	db.MustExec(t, fmt.Sprintf(`CREATE TABLE %s PARTITION OF watermill_inbox FOR VALUES FROM ('%s') TO ('%s')`,
		name, inbox.UUIDv7.Bound(from), inbox.UUIDv7.Bound(to)))
}

// makeUnsent processes messages of the consumer "c". Each returns one message, which stays unsent.
func makeUnsent(t testing.TB, db *testdb.Database, repository inbox.Repository, ids ...string) {
	t.Helper()
	a := newForgetfulApp(t, db, repository, inbox.Options{})
	a.router.AddMiddleware(a.inbox.Middleware)
	a.router.AddHandler("c", "payments", a.broker, "events", &discard{}, func(msg *message.Message) ([]*message.Message, error) {
		return []*message.Message{newMessage("event of " + msg.UUID)}, nil
	})
	a.run()
	for _, id := range ids {
		a.publish("payments", newMessage(id))
	}
	a.stop()
}

// wantUnsent fails the test unless the messages of just these records are unsent, and readable.
func wantUnsent(t testing.TB, repository inbox.Records, ids ...string) []inbox.Record {
	t.Helper()
	unsent, err := inbox.ListUnsent(context.Background(), repository, -time.Hour, inbox.Record{}, 100)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	var records []inbox.Record
	for _, u := range unsent {
		if u.Err != nil || u.Topic != "events" || len(u.Messages) != 1 || u.Messages[0].UUID != "event of "+u.Key.MessageID {
			t.Errorf("unsent of %s: %+v", u.Key, u)
		}
		got, records = append(got, u.Key.MessageID), append(records, u.Record)
	}
	slices.Sort(ids)
	if !slices.Equal(got, ids) {
		t.Errorf("unsent are %q, want %q", got, ids)
	}
	return records
}

func exists(t testing.TB, db *testdb.Database, table string) bool {
	t.Helper()
	return db.Count(t, `SELECT count(*) FROM pg_class WHERE oid = to_regclass($1)`, table) == 1
}

func partitionsOf(t testing.TB, db *testdb.Database) int {
	t.Helper()
	return db.Count(t, `SELECT count(*) FROM pg_inherits WHERE inhparent = 'watermill_inbox'::regclass`)
}

func pass(t testing.TB, keeper *partitions.Partitions) partitions.Pass {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	done, err := keeper.Pass(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return done
}

// claim claims the id and commits; it reports whether the key was free.
func claim(ctx context.Context, repository inbox.Repository, id string) (free bool, err error) {
	transaction, record, err := repository.Claim(ctx, inbox.ClaimParams{Key: inbox.Key{Consumer: "c", MessageID: id}})
	if err != nil {
		return false, err
	}
	if record != nil {
		return false, nil
	}
	return true, transaction.Commit(ctx)
}

func wantClaim(t testing.TB, repository inbox.Repository, id string, free bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if got, err := claim(ctx, repository, id); err != nil || got != free {
		t.Errorf("%s: free is %v, %v, want %v", id, got, err, free)
	}
}

// wantRefused fails the test unless the claim's error matches and is handled as such an error must be.
func wantRefused(t testing.TB, repository inbox.Repository, id string, want error) {
	t.Helper()
	_, err := claim(context.Background(), repository, id)
	if !errors.Is(err, want) {
		t.Errorf("%s: the error is %v, want %v", id, err, want)
		return
	}
	permanent := want != partitions.ErrNoPartition
	claim := &inbox.Error{Step: "claim", Err: err}
	if inbox.ShouldPoison(claim) != permanent || inbox.ShouldRetry(middleware.RetryParams{Err: claim}) == permanent {
		t.Errorf("%s: poison or retry is wrong for %v", id, err)
	}
}

// However long the retention is, the first partition that is made holds all of it and the present, so that claims work at
// once and no id of the retention is too old.
func TestTheFirstPartitionHoldsThePresent(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQL(t, "postgres")
	db.Partitioned(t, partitions.Options{Retention: 990 * 24 * time.Hour, Ahead: 2 * 24 * time.Hour})
	if got := partitionsOf(t, db); got != 3 {
		t.Errorf("%d partitions, want one up to today and two days", got)
	}
	repository := db.Repository(t, inboxsql.Options{})
	for _, at := range []time.Time{daysAgo(990), daysAgo(30), time.Now(), daysAgo(-2)} {
		wantClaim(t, repository, testdb.ID(inbox.UUIDv7, at, 1), true)
	}
	wantRefused(t, repository, testdb.ID(inbox.UUIDv7, daysAgo(991), 1), inbox.ErrTooOld)
}

func TestPartitionsAreMadeAhead(t *testing.T) {
	t.Parallel()
	for _, kind := range []inbox.IDKind{inbox.UUIDv7, inbox.ULID} {
		drivers(t, func(t *testing.T, driver string) {
			t.Run(kind.String(), func(t *testing.T) {
				db := testdb.PostgreSQL(t, driver)
				db.SetMaxOpenConns(1) // nothing needs a second connection
				keeper := db.Partitioned(t, partitions.Options{IDs: kind, Retention: 3 * 24 * time.Hour, Ahead: 2 * 24 * time.Hour})
				if got := partitionsOf(t, db); got != 3 {
					t.Errorf("%d partitions, want one up to today and two days", got)
				}
				again := pass(t, keeper)
				if len(again.Created)+len(again.Retired) != 0 || again.Left <= 2*24*time.Hour || again.Left > 3*24*time.Hour {
					t.Errorf("the second pass says %+v", again)
				}
				repository := db.Repository(t, inboxsql.Options{})
				for n := -3; n <= 2; n++ {
					from, to := daysAgo(-n), daysAgo(-n-1)
					first, last := kind.Bound(from), testdb.ID(kind, to.Add(-time.Millisecond), 999999999)
					for _, id := range []string{first, testdb.ID(kind, from, 1), last} {
						wantClaim(t, repository, id, true)
						wantClaim(t, repository, id, false)
					}
				}
				for n, want := range map[int]int{-3: 4 * 3, 1: 3, 2: 3} {
					if got := db.Count(t, `SELECT count(*) FROM watermill_inbox WHERE tableoid = $1::regclass`, partitionFrom(daysAgo(-n))); got != want {
						t.Errorf("%d records in the partition from %s, want %d", got, daysAgo(-n), want)
					}
				}
				wantRefused(t, repository, testdb.ID(kind, daysAgo(3).Add(-time.Millisecond), 999999999), inbox.ErrTooOld)
				wantRefused(t, repository, kind.Bound(time.UnixMilli(0)), inbox.ErrTooOld)
				wantRefused(t, repository, kind.Bound(daysAgo(-3)), partitions.ErrNoPartition)
				wantRefused(t, repository, kind.Bound(time.UnixMilli(1<<48-1)), partitions.ErrNoPartition) // in the year 10889
				wantIdle(t, db)
			})
		})
	}
}

func TestOtherIDsAreRefusedBeforeSQL(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQL(t, "postgres")
	pool := db.Open(t)
	for kind, ids := range map[inbox.IDKind][]string{
		inbox.UUIDv7: {"01ARZ3NDEKTSV4RRFFQ69G5FAV", "017F22E2-79B0-7CC3-98C4-DC0C0C07398F", "017f22e2-79b0-4cc3-98c4-dc0c0c07398f", "017f22e279b07cc398c4dc0c0c07398f", "1"},
		inbox.ULID:   {"017f22e2-79b0-7cc3-98c4-dc0c0c07398f", "01arz3ndektsv4rrffq69g5fav", "1"},
	} {
		repository, err := inboxsql.NewRepository(pool, inboxsql.Options{SchemaAdapter: inboxsql.PartitionedPostgreSQLSchema{IDs: kind}})
		if err != nil {
			t.Fatal(err)
		}
		for _, id := range ids {
			wantRefused(t, repository, id, inbox.ErrInvalidKey)
		}
	}
	if open := pool.Stats().OpenConnections; open != 0 {
		t.Errorf("%d connections were opened", open)
	}
}

// Nobody has run Partitions for a week, or a DBA has detached too much: a fresh message stays with the broker,
// and is handled when the partitions are there.
func TestMissingPartitionsAreTransient(t *testing.T) {
	t.Parallel()
	drivers(t, func(t *testing.T, driver string) {
		db := testdb.PostgreSQL(t, driver)
		db.SetMaxOpenConns(1)
		keeper := db.Partitioned(t, partitions.Options{Retention: 10 * 24 * time.Hour})
		repository := db.Repository(t, inboxsql.Options{})
		wantClaim(t, repository, testdb.ID(inbox.UUIDv7, time.Now(), 1), true)
		db.MustExec(t, `DROP TABLE `+partitionFrom(daysAgo(10)))
		db.MustExec(t, `DROP TABLE `+partitionFrom(daysAgo(-1)))
		makePartition(t, db, "oldest", daysAgo(10), daysAgo(7))
		fresh := testdb.ID(inbox.UUIDv7, time.Now(), 2)
		for _, id := range []string{fresh, testdb.ID(inbox.UUIDv7, daysAgo(5), 1)} {
			wantRefused(t, repository, id, partitions.ErrNoPartition)
		}
		wantRefused(t, repository, testdb.ID(inbox.UUIDv7, daysAgo(11), 1), inbox.ErrTooOld)
		if err := repository.Check(context.Background()); err == nil || !strings.Contains(err.Error(), "no partition for the present") {
			t.Errorf("the check says %v", err)
		}
		if done := pass(t, keeper); !slices.Equal(done.Created, []string{partitionFrom(daysAgo(7)), partitionFrom(daysAgo(-1))}) {
			t.Errorf("the pass says %+v", done)
		}
		wantClaim(t, repository, fresh, true)
		db.MustExec(t, `DROP TABLE oldest, `+partitionFrom(daysAgo(7))+`, `+partitionFrom(daysAgo(-1)))
		for _, id := range []string{fresh, inbox.UUIDv7.Bound(time.UnixMilli(0))} {
			wantRefused(t, repository, id, partitions.ErrNoPartition)
		}
	})
}

// A constraint of the user's has the same SQLSTATE, and is neither too old nor a missing partition.
func TestConstraintsOfTheUserAreNotPartitions(t *testing.T) {
	t.Parallel()
	drivers(t, func(t *testing.T, driver string) {
		db := testdb.PostgreSQL(t, driver)
		db.Partitioned(t, partitions.Options{})
		db.MustExec(t, `ALTER TABLE watermill_inbox ADD CONSTRAINT mine CHECK (consumer <> 'c')`)
		_, err := claim(context.Background(), db.Repository(t, inboxsql.Options{}), testdb.ID(inbox.UUIDv7, time.Now(), 1))
		if err == nil || !strings.Contains(err.Error(), "mine") || errors.Is(err, inbox.ErrTooOld) || errors.Is(err, partitions.ErrNoPartition) {
			t.Fatalf("the error is %v", err)
		}
	})
}

func TestPartitionedCheckRefuses(t *testing.T) {
	t.Parallel()
	const columns = `consumer text COLLATE "C" NOT NULL, message_id text COLLATE "C" NOT NULL, processed_at timestamptz NOT NULL DEFAULT now()`
	table := `CREATE TABLE watermill_inbox (` + columns + `, PRIMARY KEY (consumer, message_id))`
	parts := table + ` PARTITION BY RANGE (message_id); `
	part := func(kind inbox.IDKind, from, to time.Time) string {
		return fmt.Sprintf(`FOR VALUES FROM ('%s') TO ('%s')`, kind.Bound(from), kind.Bound(to))
	}
	present := `CREATE TABLE p PARTITION OF watermill_inbox ` + part(inbox.UUIDv7, daysAgo(1), daysAgo(-2)) + `; `
	for name, c := range map[string]struct {
		ddl, want string // empty: nothing
		passes    bool   // Pass mends it
	}{
		"no table":                      {`SELECT 1`, "the table does not exist", true},
		"a plain table":                 {table, "it is not partitioned by RANGE (message_id)", false},
		"hash partitions":               {table + ` PARTITION BY HASH (message_id)`, "it is not partitioned by RANGE (message_id)", false},
		"ranges of the consumer":        {table + ` PARTITION BY RANGE (consumer)`, "it is not partitioned by RANGE (message_id)", false},
		"ranges of both":                {table + ` PARTITION BY RANGE (message_id, consumer)`, "it is not partitioned by RANGE (message_id)", false},
		"another collation":             {strings.Replace(parts, `message_id text COLLATE "C"`, `message_id text COLLATE "und-x-icu"`, 1) + present, `message_id must be COLLATE "C"`, false},
		"a DEFAULT partition":           {parts + present + `CREATE TABLE d PARTITION OF watermill_inbox DEFAULT`, "DEFAULT partition", false},
		"ULIDs":                         {parts + `CREATE TABLE p PARTITION OF watermill_inbox ` + part(inbox.ULID, daysAgo(1), daysAgo(-1)), "which is not a UUIDv7", false},
		"bounds that are no ids":        {parts + present + `CREATE TABLE q PARTITION OF watermill_inbox FOR VALUES FROM ('03') TO ('04')`, "which is not a UUIDv7", false},
		"partitions of partitions":      {parts + present + `CREATE TABLE q PARTITION OF watermill_inbox ` + part(inbox.UUIDv7, daysAgo(9), daysAgo(8)) + ` PARTITION BY RANGE (consumer)`, "is itself partitioned", false},
		"no partitions":                 {parts, "no partition for the present", true},
		"only old ones":                 {parts + `CREATE TABLE q PARTITION OF watermill_inbox ` + part(inbox.UUIDv7, daysAgo(9), daysAgo(0)), "no partition for the present", true},
		"only new ones":                 {parts + `CREATE TABLE q PARTITION OF watermill_inbox ` + part(inbox.UUIDv7, daysAgo(-1), daysAgo(-2)), "no partition for the present", false},
		"no unique key":                 {strings.Replace(parts, ", PRIMARY KEY (consumer, message_id)", "", 1) + present, "no primary key", false},
		"no table of unsent messages":   {parts + present, "the table of unsent messages does not exist", false},
		"nothing":                       {parts + present, "", true},
		"nothing, without a beginning":  {parts + `CREATE TABLE p PARTITION OF watermill_inbox FOR VALUES FROM (MINVALUE) TO ('` + inbox.UUIDv7.Bound(daysAgo(-3)) + `')`, "", true},
		"nothing, and without an end":   {parts + `CREATE TABLE p PARTITION OF watermill_inbox FOR VALUES FROM (MINVALUE) TO (MAXVALUE)`, "", true},
		"nothing, but the present's is": {parts + present + `CREATE TABLE q PARTITION OF watermill_inbox ` + part(inbox.UUIDv7, daysAgo(9), daysAgo(8)), "", true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := testdb.PostgreSQL(t, "postgres")
			db.Adapter = inboxsql.PartitionedPostgreSQLSchema{IDs: inbox.UUIDv7}
			if name != "no table" && name != "no table of unsent messages" {
				db.MustExec(t, postgreSQLUnsent)
			}
			db.MustExec(t, c.ddl)
			repository := db.RepositoryWithoutSchema(t, inboxsql.Options{})
			if err := repository.Check(context.Background()); (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Errorf("the check says %v, want %q", err, c.want)
			}
			keeper, err := partitions.New(db.DB, partitions.Options{IDs: inbox.UUIDv7, Retention: time.Hour, Ahead: 24 * time.Hour})
			if err != nil {
				t.Fatal(err)
			}
			before := db.Count(t, `SELECT count(*) FROM pg_class WHERE relnamespace = current_schema()::regnamespace`)
			if _, err := keeper.Pass(context.Background()); (err == nil) != c.passes {
				t.Errorf("the pass says %v", err)
			}
			if c.passes {
				if err := repository.Check(context.Background()); err != nil {
					t.Errorf("after a pass: %v", err)
				}
			} else if before != db.Count(t, `SELECT count(*) FROM pg_class WHERE relnamespace = current_schema()::regnamespace`) {
				t.Error("a pass changed the table")
			}
		})
	}
	t.Run("the kind is not set", func(t *testing.T) {
		t.Parallel()
		db := testdb.PostgreSQL(t, "postgres")
		db.Partitioned(t, partitions.Options{})
		db.Adapter = inboxsql.PartitionedPostgreSQLSchema{}
		_, err := claim(context.Background(), db.RepositoryWithoutSchema(t, inboxsql.Options{}), testdb.ID(inbox.UUIDv7, time.Now(), 1))
		if err == nil || !strings.Contains(err.Error(), "IDs must be UUIDv7 or ULID") || inbox.ShouldPoison(&inbox.Error{Err: err}) {
			t.Errorf("the error is %v", err)
		}
	})
	t.Run("the plain adapter", func(t *testing.T) {
		t.Parallel()
		db := testdb.PostgreSQL(t, "postgres")
		db.Partitioned(t, partitions.Options{})
		db.Adapter = inboxsql.DefaultPostgreSQLSchema{}
		wantClaim(t, db.RepositoryWithoutSchema(t, inboxsql.Options{}), testdb.ID(inbox.UUIDv7, time.Now(), 1), true)
	})
}

func TestTheServersVersionIsChecked(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQL(t, "postgres")
	version := db.Count(t, `SELECT current_setting('server_version_num')::int`)
	for least, problems := range map[int]int{version: 0, version + 1: 1} {
		query := dialect.Partitioned{}.CheckServer(least)
		if got := db.Count(t, `SELECT count(*) FROM (`+query.Text+`) AS problems`); got != problems {
			t.Errorf("at least %d on %d: %d problems, want %d", least, version, got, problems)
		}
	}
}
