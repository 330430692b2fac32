package sql_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/internal/integration/testdb"
	"github.com/devmappa/watermill-inbox/partitions"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

// expiring makes a table with a partition "expired" that a pass retires, and lets the partitions be made again.
func expiring(t testing.TB, driver string) (*testdb.Database, *partitions.Partitions) {
	t.Helper()
	db := testdb.PostgreSQL(t, driver)
	keeper := db.Partitioned(t, partitions.Options{})
	makePartition(t, db, "expired", daysAgo(9), daysAgo(8))
	return db, keeper
}

// old is an id of the partition "expired".
func old(n int) string { return testdb.ID(inbox.UUIDv7, daysAgo(9).Add(time.Hour), n) }

// young is an id of the present.
func young(n int) string { return testdb.ID(inbox.UUIDv7, present, n) }

var present = time.Now()

func TestPartitionsAreRetired(t *testing.T) {
	t.Parallel()
	drivers(t, func(t *testing.T, driver string) {
		db, keeper := expiring(t, driver)
		db.SetMaxOpenConns(1)
		repository := db.Repository(t, inboxsql.Options{})
		wantClaim(t, repository, old(1), true)
		wantClaim(t, repository, young(1), true)
		if done := pass(t, keeper); !slices.Equal(done.Retired, []string{"expired"}) || len(done.Created) != 0 {
			t.Errorf("the pass says %+v", done)
		}
		if exists(t, db, "expired") {
			t.Error("the partition is still there")
		}
		wantRefused(t, repository, old(1), inbox.ErrTooOld)
		if got := db.Count(t, `SELECT count(*) FROM watermill_inbox`); got != 1 {
			t.Errorf("%d records", got)
		}
		// What was dropped is not made again by a longer retention: its messages would be new.
		longer, err := partitions.New(db.DB, partitions.Options{IDs: inbox.UUIDv7, Retention: 20 * 24 * time.Hour, Ahead: 24 * time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		if done := pass(t, longer); len(done.Created) != 0 {
			t.Errorf("a longer retention made %v", done.Created)
		}
		wantRefused(t, repository, old(1), inbox.ErrTooOld)
	})
}

// Unsent messages outlive the partition of their record: they hold up nothing, and are found and marked all the same.
func TestUnsentMessagesOutliveTheirPartition(t *testing.T) {
	t.Parallel()
	drivers(t, func(t *testing.T, driver string) {
		db, keeper := expiring(t, driver)
		makePartition(t, db, "later", daysAgo(5), daysAgo(4))
		repository := db.Repository(t, inboxsql.Options{})
		ctx := context.Background()
		makeUnsent(t, db, repository, old(0), old(1), old(2), young(1))
		key := inbox.Key{Consumer: "c", MessageID: old(0)}
		record, err := repository.Look(ctx, inbox.ClaimParams{Key: key})
		if err != nil || record == nil {
			t.Fatalf("the record is %+v, %v", record, err)
		}
		if locked, err := repository.MarkSent(ctx, []inbox.Record{*record}); err != nil || len(locked) != 0 {
			t.Fatalf("%v are locked, %v", locked, err)
		}
		for _, want := range [][]string{{"expired", "later"}, nil} {
			if retired := pass(t, keeper).Retired; !slices.Equal(retired, want) {
				t.Errorf("retired were %v, want %v", retired, want)
			}
		}
		if exists(t, db, "expired") || exists(t, db, "later") {
			t.Error("a partition is still there")
		}
		wantRefused(t, repository, old(1), inbox.ErrTooOld)
		wantRefused(t, repository, old(3), inbox.ErrTooOld)
		wantRefused(t, repository, testdb.ID(inbox.UUIDv7, daysAgo(5), 1), inbox.ErrTooOld)
		longer, err := partitions.New(db.DB, partitions.Options{IDs: inbox.UUIDv7, Retention: 20 * 24 * time.Hour, Ahead: 24 * time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		if done := pass(t, longer); len(done.Created)+len(done.Retired) != 0 {
			t.Errorf("with a longer retention the pass says %+v", done)
		}
		wantRefused(t, repository, testdb.ID(inbox.UUIDv7, daysAgo(5), 1), inbox.ErrTooOld)

		unsent := wantUnsent(t, repository, old(1), old(2), young(1))
		statistics, err := repository.Statistics(ctx, inbox.AllConsumers())
		if err != nil || len(statistics.Consumers) != 1 || statistics.Consumers[0].Records != 1 || statistics.Consumers[0].Unsent != 3 {
			t.Errorf("the statistics are %+v, %v", statistics, err)
		}
		// What an operator or a relay does with them.
		events := &recorder{}
		list, err := inbox.ListUnsent(ctx, repository, -time.Hour, inbox.Record{}, 1)
		if err != nil || len(list) != 1 {
			t.Fatalf("unsent: %+v, %v", list, err)
		}
		if err := list[0].Publish(ctx, repository, events); err != nil || len(events.all()) != 1 {
			t.Errorf("%d were published, %v", len(events.all()), err)
		}
		wantUnsent(t, repository, old(2), young(1))
		relay, err := inbox.NewRelay(repository, inbox.RelayOptions{Publishers: map[string]message.Publisher{"c": events}, Age: time.Nanosecond})
		if err != nil {
			t.Fatal(err)
		}
		if done, err := relay.Pass(ctx, "c"); err != nil || done.Published != 2 || len(events.all()) != 3 {
			t.Errorf("the relay's pass says %+v, %v", done, err)
		}
		wantUnsent(t, repository)
		if locked, err := repository.MarkSent(ctx, unsent); err != nil || len(locked) != 0 {
			t.Errorf("marked a second time, %v are locked, %v", locked, err)
		}
	})
}

// A handler that was open while its partition was looked at stores messages: the partition is detached by then, and
// what is stored stays.
func TestAHandlerStoresWhileItsPartitionIsRetired(t *testing.T) {
	t.Parallel()
	drivers(t, func(t *testing.T, driver string) {
		db, keeper := expiring(t, driver)
		repository := db.Repository(t, inboxsql.Options{})
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		key := inbox.Key{Consumer: "c", MessageID: old(1)}
		handler, _, err := repository.Claim(ctx, inbox.ClaimParams{Key: key})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := handler.Store(ctx, inbox.StoreParams{Topic: "events", Produced: []byte("stored")}); err != nil {
			t.Fatal(err)
		}
		done := passing(ctx, keeper)
		awaitPending(t, db, "expired")
		if err := handler.Commit(ctx); err != nil {
			t.Fatal(err)
		}
		if result := <-done; result.err != nil || !slices.Equal(result.Retired, []string{"expired"}) {
			t.Fatalf("the pass says %+v", result)
		}
		wantRefused(t, repository, key.MessageID, inbox.ErrTooOld)
		unsent, err := repository.FindRecords(ctx, inbox.Selection{Unsent: true}, inbox.Record{}, 10)
		if err != nil || len(unsent) != 1 || unsent[0].Key != key || string(unsent[0].Produced) != "stored" {
			t.Fatalf("unsent are %+v, %v", unsent, err)
		}
		if locked, err := repository.MarkSent(ctx, unsent); err != nil || len(locked) != 0 {
			t.Fatalf("%v are locked, %v", locked, err)
		}
		wantUnsent(t, repository)
	})
}

// A handler that is open in a partition while that is detached can commit, but store no more. Its message is too old
// from then on.
func TestAHandlerIsOpenWhileItsPartitionIsRetired(t *testing.T) {
	t.Parallel()
	drivers(t, func(t *testing.T, driver string) {
		db, keeper := expiring(t, driver)
		repository := db.Repository(t, inboxsql.Options{})
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		var handlers []inbox.Transaction
		for n := range 2 {
			handler, _, err := repository.Claim(ctx, inbox.ClaimParams{Key: inbox.Key{Consumer: "c", MessageID: old(n)}})
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = handler.Rollback() }()
			if err := db.Write(inbox.ContextWithTransaction(ctx, handler), fmt.Sprint(n)); err != nil {
				t.Fatal(err)
			}
			handlers = append(handlers, handler)
		}
		done := passing(ctx, keeper)
		awaitPending(t, db, "expired")
		if err := handlers[0].Commit(ctx); err != nil {
			t.Error(err)
		}
		if _, err := handlers[1].Store(ctx, inbox.StoreParams{Topic: "events", Produced: []byte("stored")}); !errors.Is(err, inbox.ErrTransactionBroken) {
			t.Errorf("storing says %v", err)
		}
		if err := handlers[1].Rollback(); err != nil {
			t.Error(err)
		}
		if result := <-done; result.err != nil || !slices.Equal(result.Retired, []string{"expired"}) {
			t.Fatalf("the pass says %+v", result)
		}
		wantRefused(t, repository, old(0), inbox.ErrTooOld)
		wantRefused(t, repository, old(1), inbox.ErrTooOld)
		if got, err := db.Effects(ctx); err != nil || !slices.Equal(got, []string{"0"}) {
			t.Errorf("effects %v, %v", got, err)
		}
	})
}

// passResult is what a pass in another goroutine returned.
type passResult struct {
	partitions.Pass
	err error
}

func passing(ctx context.Context, keeper *partitions.Partitions) <-chan passResult {
	done := make(chan passResult, 1)
	go func() {
		pass, err := keeper.Pass(context.WithoutCancel(ctx))
		done <- passResult{pass, err}
	}()
	return done
}

// awaitPending waits until the partition's detachment waits for open transactions.
func awaitPending(t testing.TB, db *testdb.Database, partition string) {
	t.Helper()
	eventually(t, "the detachment is pending", func() bool { return pending(t, db, partition) })
}

func pending(t testing.TB, db *testdb.Database, partition string) bool {
	t.Helper()
	return db.Count(t, `SELECT count(*) FROM pg_inherits WHERE inhrelid = to_regclass($1) AND inhdetachpending`, partition) == 1
}

// detacher is the server process that waits in DETACH or FINALIZE.
func detacher(t testing.TB, db *testdb.Database) (pid int) {
	t.Helper()
	err := db.QueryRow(`SELECT coalesce(max(pid), 0) FROM pg_stat_activity WHERE state = 'active' AND query LIKE 'ALTER TABLE "' || current_schema() || '".% DETACH PARTITION %'`).Scan(&pid)
	if err != nil {
		t.Fatal(err)
	}
	return pid
}

// detachers is how many of them there are.
func detachers(t testing.TB, db *testdb.Database) int {
	t.Helper()
	return db.Count(t, `SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query LIKE 'ALTER TABLE "' || current_schema() || '".% DETACH PARTITION %'`)
}

// Beside open handlers, also one in the partition that is retired, partitions are made, detached and dropped, and no
// claim waits for that.
func TestClaimsDoNotWaitForPartitions(t *testing.T) {
	t.Parallel()
	drivers(t, func(t *testing.T, driver string) {
		db, _ := expiring(t, driver)
		repository := db.Repository(t, inboxsql.Options{})
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		var handlers []inbox.Transaction
		for _, id := range []string{old(1), young(1)} {
			handler, _, err := repository.Claim(ctx, inbox.ClaimParams{Key: inbox.Key{Consumer: "c", MessageID: id}})
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = handler.Rollback() }()
			handlers = append(handlers, handler)
		}
		further, err := partitions.New(db.DB, partitions.Options{IDs: inbox.UUIDv7, Retention: 24 * time.Hour, Ahead: 10 * 24 * time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		done := passing(ctx, further)
		claimed := 0
		for ; claimed < 100 || !pending(t, db, "expired"); claimed++ {
			wantClaim(t, repository, young(10+claimed), true)
			wantClaim(t, repository, young(10+claimed), false)
			if t.Failed() || ctx.Err() != nil {
				t.Fatalf("claims wait, or the detachment is not pending: %v", ctx.Err())
			}
		}
		if got := partitionsOf(t, db); got != 2+9+1 {
			t.Errorf("%d partitions while the detachment is pending, want the new ones to be there", got)
		}
		for range 100 {
			wantClaim(t, repository, young(10+claimed), true)
			claimed++
		}
		select {
		case result := <-done:
			t.Fatalf("the pass did not wait for the open handlers: %+v", result)
		default:
		}
		for _, handler := range handlers {
			if err := handler.Commit(ctx); err != nil {
				t.Fatal(err)
			}
		}
		if result := <-done; result.err != nil || !slices.Equal(result.Retired, []string{"expired"}) || len(result.Created) != 9 {
			t.Errorf("the pass says %+v", result)
		}
	})
}

// A pass that is killed leaves the rest to the next one, wherever it was.
func TestAKilledPassIsTakenUp(t *testing.T) {
	t.Parallel()
	mark := func(t *testing.T, db *testdb.Database) {
		db.MustExec(t, `DO $$ BEGIN EXECUTE format('COMMENT ON TABLE expired IS %L', format('watermill-inbox: retired partition "%s"."%s" of "%s"."%s" ', current_schema(), 'expired', current_schema(), 'watermill_inbox') ||
			(SELECT pg_get_expr(relpartbound, oid) FROM pg_class WHERE oid = 'expired'::regclass)); END $$`)
	}
	detach := func(t *testing.T, db *testdb.Database) {
		db.MustExec(t, `ALTER TABLE watermill_inbox DETACH PARTITION expired CONCURRENTLY`)
	}
	store := func(t *testing.T, db *testdb.Database) {
		makeUnsent(t, db, db.Repository(t, inboxsql.Options{}), old(1))
	}
	for name, c := range map[string]struct {
		until   func(t *testing.T, db *testdb.Database)
		retired []string
		there   bool
		unsent  []string
	}{
		"after the mark":                        {mark, []string{"expired"}, false, nil},
		"before the drop":                       {func(t *testing.T, db *testdb.Database) { mark(t, db); detach(t, db) }, []string{"expired"}, false, nil},
		"after the mark, with unsent messages":  {func(t *testing.T, db *testdb.Database) { mark(t, db); store(t, db) }, []string{"expired"}, false, []string{old(1)}},
		"before the drop, with unsent messages": {func(t *testing.T, db *testdb.Database) { mark(t, db); store(t, db); detach(t, db) }, []string{"expired"}, false, []string{old(1)}},
		"detached by somebody else":             {detach, nil, true, nil},
		"detached, and renamed to be kept": {func(t *testing.T, db *testdb.Database) {
			mark(t, db)
			detach(t, db)
			db.MustExec(t, `ALTER TABLE expired RENAME TO kept`)
		}, nil, false, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db, keeper := expiring(t, "postgres")
			c.until(t, db)
			done := pass(t, keeper)
			if !slices.Equal(done.Retired, c.retired) {
				t.Errorf("the pass says %+v, want %v to be retired", done, c.retired)
			}
			wantUnsent(t, db.Repository(t, inboxsql.Options{}), c.unsent...)
			if got := exists(t, db, "expired"); got != c.there {
				t.Errorf("the table is there: %v", got)
			}
			if strings.Contains(name, "renamed") && !exists(t, db, "kept") {
				t.Error("the renamed table was dropped")
			}
			if done := pass(t, keeper); len(done.Created)+len(done.Retired) != 0 {
				t.Errorf("the pass after it says %+v", done)
			}
		})
	}
}

func TestAPassKilledInDetach(t *testing.T) {
	t.Parallel()
	for name, interrupt := range map[string]func(t *testing.T, db *testdb.Database, cancel func()){
		"its server process": func(t *testing.T, db *testdb.Database, _ func()) {
			db.MustExec(t, `SELECT pg_terminate_backend($1)`, detacher(t, db))
		},
		"its context": func(_ *testing.T, _ *testdb.Database, cancel func()) { cancel() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db, keeper := expiring(t, "postgres")
			repository := db.Repository(t, inboxsql.Options{})
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			handler, _, err := repository.Claim(ctx, inbox.ClaimParams{Key: inbox.Key{Consumer: "c", MessageID: old(1)}})
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = handler.Rollback() }()
			killable, kill := context.WithCancel(ctx)
			defer kill()
			failed := make(chan error, 1)
			go func() {
				_, err := keeper.Pass(killable)
				failed <- err
			}()
			awaitPending(t, db, "expired")
			interrupt(t, db, kill)
			// Database/sql may have tried again on another connection, and found the detachment pending.
			if err := <-failed; err == nil && name == "its context" {
				t.Fatal("the interrupted pass reports no error")
			}
			if !pending(t, db, "expired") {
				t.Fatal("the detachment is not pending any more")
			}
			// The window has moved on, and claims go on.
			wantRefused(t, repository, old(2), inbox.ErrTooOld)
			wantClaim(t, repository, young(1), true)
			done := passing(ctx, keeper)
			eventually(t, "the next pass waits for the handler", func() bool { return detacher(t, db) != 0 })
			wantClaim(t, repository, young(2), true)
			if err := handler.Commit(ctx); err != nil {
				t.Fatal(err)
			}
			if result := <-done; result.err != nil || !slices.Equal(result.Retired, []string{"expired"}) {
				t.Fatalf("the next pass says %+v", result)
			}
		})
	}
}

// A pass finds a detachment pending that another one is still waiting for, and one of the two finishes it.
func TestAPassFinishesAnotherOnesDetach(t *testing.T) {
	t.Parallel()
	drivers(t, func(t *testing.T, driver string) {
		db, keeper := expiring(t, driver)
		repository := db.Repository(t, inboxsql.Options{})
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		handler, _, err := repository.Claim(ctx, inbox.ClaimParams{Key: inbox.Key{Consumer: "c", MessageID: old(1)}})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = handler.Rollback() }()
		first := passing(ctx, keeper)
		awaitPending(t, db, "expired")
		second := passing(ctx, keeper)
		eventually(t, "both wait", func() bool { return detachers(t, db) == 2 })
		if err := handler.Commit(ctx); err != nil {
			t.Fatal(err)
		}
		a, b := <-first, <-second
		if err := errors.Join(a.err, b.err); err != nil || len(a.Retired)+len(b.Retired) != 1 {
			t.Errorf("retired were %v and %v, %v", a.Retired, b.Retired, err)
		}
	})
}

// Services that start at once, before there is a table, make it together.
func TestPartitionsMakeTheTableInManyInstancesAtOnce(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQL(t, "postgres")
	var results []<-chan passResult
	for range 8 {
		pool := db.Open(t)
		pool.SetMaxOpenConns(1)
		keeper, err := partitions.New(pool, partitions.Options{IDs: inbox.UUIDv7, Retention: 24 * time.Hour, Ahead: 24 * time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		results = append(results, passing(context.Background(), keeper))
	}
	created := 0
	for _, done := range results {
		result := <-done
		if result.err != nil {
			t.Error(result.err)
		}
		created += len(result.Created)
	}
	if created != 2 || partitionsOf(t, db) != 2 {
		t.Errorf("%d partitions were made and %d are there, want 2", created, partitionsOf(t, db))
	}
}

// Many instances at once make each partition once, and retire each once. One of them finishes what another one is
// still waiting for.
func TestPartitionsInManyInstancesAtOnce(t *testing.T) {
	t.Parallel()
	db, _ := expiring(t, "postgres")
	makePartition(t, db, "expired2", daysAgo(8), daysAgo(7))
	makePartition(t, db, "expired3", daysAgo(7), daysAgo(6))
	repository := db.Repository(t, inboxsql.Options{})
	unsent := testdb.ID(inbox.UUIDv7, daysAgo(7), 1)
	makeUnsent(t, db, repository, unsent)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	handler, _, err := repository.Claim(ctx, inbox.ClaimParams{Key: inbox.Key{Consumer: "c", MessageID: old(1)}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = handler.Rollback() }()
	var results []<-chan passResult
	for range 4 {
		keeper, err := partitions.New(db.Open(t), partitions.Options{IDs: inbox.UUIDv7, Retention: 24 * time.Hour, Ahead: 4 * 24 * time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		results = append(results, passing(ctx, keeper))
	}
	awaitPending(t, db, "expired")
	wantClaim(t, repository, young(1), true)
	if err := handler.Commit(ctx); err != nil {
		t.Fatal(err)
	}
	var created, retired []string
	for _, done := range results {
		result := <-done
		if result.err != nil {
			t.Errorf("one pass says: %v", result.err)
		}
		created, retired = append(created, result.Created...), append(retired, result.Retired...)
	}
	keeper, err := partitions.New(db.DB, partitions.Options{IDs: inbox.UUIDv7, Retention: 24 * time.Hour, Ahead: 4 * 24 * time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	last := pass(t, keeper)
	created, retired = append(created, last.Created...), append(retired, last.Retired...)
	slices.Sort(created)
	slices.Sort(retired)
	if len(created) != 3 || len(slices.Compact(slices.Clone(created))) != 3 {
		t.Errorf("created were %v, want the three days each once", created)
	}
	if !slices.Equal(retired, []string{"expired", "expired2", "expired3"}) {
		t.Errorf("retired were %v, want each once", retired)
	}
	if exists(t, db, "expired") || exists(t, db, "expired2") || exists(t, db, "expired3") {
		t.Error("a partition is still there")
	}
	wantUnsent(t, repository, unsent)
	wantClaim(t, repository, young(1), false)
}

// Copies of old and young messages race passes that attach, detach and drop the partition of the old ones. Each
// message has its effect once or, if old, is refused; no young one is refused.
func TestClaimsRacePartitions(t *testing.T) {
	t.Parallel()
	drivers(t, func(t *testing.T, driver string) {
		db, keeper := expiring(t, driver)
		db.SetMaxOpenConns(12)
		handle := wrap(t, db.Repository(t, inboxsql.Options{}), inbox.Options{}, func(msg *message.Message) error {
			return db.Write(msg.Context(), msg.UUID)
		})
		// Now and then PostgreSQL answers a claim that meets ATTACH or DETACH with an internal error ("invalid
		// arbiter index list"). That is transient, and Retry's to mend.
		retried := func(id string) (err error) {
			for range 10 {
				var stateErr interface{ SQLState() string }
				if _, err = handle(newMessage(id)); !errors.As(err, &stateErr) || stateErr.SQLState() != "XX000" || inbox.ShouldPoison(err) {
					break
				}
			}
			return err
		}
		const rounds, messages, copies = 5, 20, 4
		var refused atomic.Int32
		for round := range rounds {
			// What is retired never comes back for the ids of the round before: a partition per round.
			from := daysAgo(20 - 2*round)
			name := fmt.Sprint("round", round)
			start := make(chan struct{})
			var group sync.WaitGroup
			group.Add(1)
			go func() {
				defer group.Done()
				<-start
				makePartition(t, db, name, from, from.AddDate(0, 0, 1))
				if _, err := keeper.Pass(context.Background()); err != nil {
					t.Error(err)
				}
			}()
			for worker := range copies {
				group.Add(1)
				go func() {
					defer group.Done()
					<-start
					for n := range messages {
						n := (n + worker*messages/copies) % messages
						if err := retried(testdb.ID(inbox.UUIDv7, from, n)); err != nil {
							// The partition may also have come between the claim and the look for the reason.
							if !errors.Is(err, inbox.ErrTooOld) && (inbox.ShouldPoison(err) || !strings.Contains(err.Error(), "23514")) {
								t.Errorf("an old message: %v", err)
							}
							refused.Add(1)
						}
						if err := retried(testdb.ID(inbox.UUIDv7, today(), round*messages+n)); err != nil {
							t.Errorf("a young message: %v", err)
						}
					}
				}()
			}
			close(start)
			group.Wait()
			if exists(t, db, name) {
				t.Errorf("%s is still there", name)
			}
		}
		effects, err := db.Effects(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		slices.Sort(effects)
		if once := slices.Compact(slices.Clone(effects)); len(once) != len(effects) {
			t.Errorf("%d effects of %d messages", len(effects), len(once))
		}
		if got := db.Count(t, `SELECT count(*) FROM effects WHERE effect COLLATE "C" >= $1`, inbox.UUIDv7.Bound(today())); got != rounds*messages {
			t.Errorf("%d effects of young messages, want %d", got, rounds*messages)
		}
		t.Logf("%d claims of old messages were refused, %d had an effect", refused.Load(), len(effects)-rounds*messages)
	})
}

// A table that has the name of a partition to be made may hold its records: nothing is made in its place, and the
// error says so. The other partitions are made.
func TestATableInTheWayIsNotReplaced(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQL(t, "postgres")
	keeper := db.Partitioned(t, partitions.Options{Ahead: 3 * 24 * time.Hour})
	repository := db.Repository(t, inboxsql.Options{})
	id := testdb.ID(inbox.UUIDv7, daysAgo(-1), 1)
	wantClaim(t, repository, id, true)
	name := "watermill_inbox_p" + daysAgo(-1).Format("20060102t150405")
	db.MustExec(t, `ALTER TABLE watermill_inbox DETACH PARTITION `+name)
	db.MustExec(t, `DROP TABLE watermill_inbox_p`+daysAgo(-2).Format("20060102t150405"))
	done, err := keeper.Pass(context.Background())
	if err == nil || !strings.Contains(err.Error(), name) || len(done.Created) != 1 {
		t.Fatalf("the pass says %+v, %v", done, err)
	}
	if done.Left > 2*24*time.Hour {
		t.Errorf("left are %s, want the time up to the hole", done.Left)
	}
	wantRefused(t, repository, id, partitions.ErrNoPartition)
}

// A pass needs the table's owner and nothing more, and what another owner's pass makes is the owner's.
func TestPartitionsOfTheOwner(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQL(t, "postgres")
	role := "role_" + testdb.RandomName()
	var schema string
	if err := db.QueryRow(`SELECT current_schema()`).Scan(&schema); err != nil {
		t.Fatal(err)
	}
	db.MustExec(t, `CREATE ROLE `+role+` LOGIN`)
	t.Cleanup(func() { db.MustExec(t, `DROP OWNED BY `+role+` CASCADE; DROP ROLE `+role) })
	db.MustExec(t, `GRANT USAGE, CREATE ON SCHEMA `+schema+` TO `+role)
	asRole := *db
	asRole.URL = strings.Replace(db.URL, "postgres://postgres@", "postgres://"+role+"@", 1)
	asRole.DB = asRole.Open(t)
	keeper := asRole.Partitioned(t, partitions.Options{})
	further, err := partitions.New(db.DB, partitions.Options{IDs: inbox.UUIDv7, Retention: 24 * time.Hour, Ahead: 10 * 24 * time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	if done := pass(t, further); len(done.Created) == 0 {
		t.Fatalf("the superuser's pass says %+v", done)
	}
	if got := db.Count(t, `SELECT count(*) FROM pg_inherits JOIN pg_class ON oid = inhrelid WHERE inhparent = 'watermill_inbox'::regclass AND relowner <> $1::regrole`, role); got != 0 {
		t.Errorf("%d partitions are somebody else's", got)
	}
	makePartition(t, db, "expired", daysAgo(9), daysAgo(8))
	db.MustExec(t, `ALTER TABLE expired OWNER TO `+role)
	if done := pass(t, keeper); !slices.Equal(done.Retired, []string{"expired"}) {
		t.Errorf("the owner's pass says %+v", done)
	}
}

// Run makes a pass at once, reports a failed one and goes on.
func TestPartitionsRun(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQL(t, "postgres")
	var observed []partitions.Observation
	keeper, err := partitions.New(db.DB, partitions.Options{
		IDs: inbox.UUIDv7, Retention: 24 * time.Hour, Ahead: time.Hour, Interval: time.Millisecond,
		Observe: func(_ context.Context, observation partitions.Observation) { observed = append(observed, observation) },
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	stopped := make(chan error, 1)
	go func() { stopped <- keeper.Run(ctx) }()
	eventually(t, "the table is made", func() bool { return exists(t, db, "watermill_inbox") && partitionsOf(t, db) >= 1 })
	makePartition(t, db, "expired", daysAgo(9), daysAgo(8))
	eventually(t, "the partition is dropped", func() bool { return !exists(t, db, "expired") })
	cancel()
	if err := <-stopped; !errors.Is(err, context.Canceled) {
		t.Errorf("Run returned %v", err)
	}
	retired := func(o partitions.Observation) bool { return slices.Contains(o.Retired, "expired") }
	if len(observed) < 2 || len(observed[0].Created) == 0 || observed[0].Err != nil || !slices.ContainsFunc(observed, retired) {
		t.Errorf("observed %+v", observed)
	}
}

// Through a pooler in transaction mode nothing of a session is relied upon.
func TestPartitionsBehindPgBouncer(t *testing.T) {
	t.Parallel()
	bouncer := pooler(t, 2)
	db := testdb.PostgreSQL(t, "postgres")
	var schema string
	if err := db.QueryRow(`SELECT current_schema()`).Scan(&schema); err != nil {
		t.Fatal(err)
	}
	db.Partitioned(t, partitions.Options{})
	makePartition(t, db, "expired", daysAgo(9), daysAgo(8))
	pool, err := sql.Open("postgres", bouncer.URL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = pool.Close() })
	keeper, err := partitions.New(pool, partitions.Options{Table: schema + ".watermill_inbox", IDs: inbox.UUIDv7, Retention: 24 * time.Hour, Ahead: 10 * 24 * time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	if done := pass(t, keeper); len(done.Created) != 9 || !slices.Equal(done.Retired, []string{"expired"}) {
		t.Errorf("the pass says %+v", done)
	}
}

// The database's clock jumps ahead by ten years, and back, and before 1970: nothing is retired that this machine thinks
// is young, and claims go on.
func TestPartitionsAndAWrongClock(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQL(t, "postgres")
	keeper := db.Partitioned(t, partitions.Options{})
	repository := db.Repository(t, inboxsql.Options{})
	wantClaim(t, repository, young(1), true)
	before := partitionsOf(t, db)

	wrong := *db
	var schema string
	if err := db.QueryRow(`SELECT current_schema()`).Scan(&schema); err != nil {
		t.Fatal(err)
	}
	// What is in the schema hides what is in the catalog.
	wrong.URL = strings.Replace(db.URL, "search_path="+schema, "search_path="+schema+",pg_catalog", 1)
	wrong.DB = wrong.Open(t)
	elsewhen, err := partitions.New(wrong.DB, partitions.Options{IDs: inbox.UUIDv7, Retention: 24 * time.Hour, Ahead: 24 * time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	for clock, behind := range map[string]bool{`now() + interval '10 years'`: false, `now() - interval '3 days'`: true, `now() - interval '100 years'`: true} {
		db.MustExec(t, `CREATE OR REPLACE FUNCTION clock_timestamp() RETURNS timestamptz LANGUAGE sql AS $$ SELECT `+clock+` $$`)
		done, err := elsewhen.Pass(context.Background())
		if (err != nil) != behind || len(done.Retired) != 0 || behind && len(done.Created) != 0 {
			t.Errorf("%s: the pass says %+v, %v", clock, done, err)
		}
		wantClaim(t, repository, young(1), false)
		wantRefused(t, repository, old(1), inbox.ErrTooOld)
		wantRefused(t, repository, testdb.ID(inbox.UUIDv7, daysAgo(3), 1), inbox.ErrTooOld)
	}
	if got := partitionsOf(t, db); got <= before {
		t.Errorf("%d partitions, the clock was not wrong", got)
	}
	wantClaim(t, repository, young(2), true)
	if done := pass(t, keeper); len(done.Created)+len(done.Retired) != 0 || done.Left < 24*time.Hour {
		t.Errorf("with the right clock the pass says %+v", done)
	}
}
